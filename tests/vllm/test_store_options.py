"""The connector's configuration: the store, its limit, and permissions."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from gracekv.errors import ConfigError, StoreError
from gracekv.vllm import ContextStore, kv_transfer_config
from gracekv.vllm.serving import check_serving, checkpoint_folder, store_options


def test_the_configuration_names_the_store(root):
    extra = kv_transfer_config(root, limit_bytes=10)["kv_connector_extra_config"]
    assert store_options(extra) == {"root": root, "limit": 10, "allow": None}
    assert store_options(kv_transfer_config(root)["kv_connector_extra_config"])["limit"] is None


def only_with_key(name, parameters):
    return parameters.get("key") == f"key of {name}"


def test_requests_use_only_what_they_are_allowed(root):
    def store(allow):
        extra = kv_transfer_config(root, allow=allow)["kv_connector_extra_config"]
        return ContextStore(**store_options(json.loads(json.dumps(extra))))

    named, keyed = store(["c0", "c2"]), store(f"{__name__}:only_with_key")
    assert named.admit({"gracekv": "c2"}) == ContextStore(root).header("c2")
    assert keyed.admit({"gracekv": "c1", "key": "key of c1"}).entries > 0
    refused = (named, {}, "c1"), (keyed, {}, "c1"), (keyed, {"key": "key of c0"}, "c1")
    # A name is refused before revealing whether such a context exists.
    for asked, parameters, name in (*refused, (named, {}, "missing")):
        with pytest.raises(StoreError, match=f"may not use the context '{name}'"):
            asked.admit({"gracekv": name, **parameters})


@pytest.mark.parametrize("allow", ["", "json", "json:", "nowhere:f", "json:tool", ["../c0"], 3])
def test_an_unusable_allow_list_ends_the_start(root, allow):
    with pytest.raises(ConfigError, match="'allow'"):
        store_options({"store": str(root), "allow": allow})


UNUSABLE = [
    ({}, "must name the folder"),
    ({"store": "/nowhere/at/all"}, "is not a folder"),
    ({"store": 3}, "must name the folder"),
    ({"store": ".", "limit": 3}, "takes 'store', 'limit_bytes' and 'allow'"),
    ({"store": ".", "limit_bytes": 0}, "at least 1"),
    ({"store": ".", "limit_bytes": True}, "at least 1"),
]


@pytest.mark.parametrize(("extra", "said"), UNUSABLE)
def test_unusable_configurations_are_refused(extra, said):
    with pytest.raises(ConfigError, match=said):
        store_options(extra)


class Graphs:
    """vLLM's mode of CUDA graphs."""

    def __init__(self, full):
        self.has_full_cudagraphs = lambda: full


NEVER_SERVED = [
    ("", "lora_config", object(), "LoRA adapters"),
    ("", "speculative_config", object(), "speculative decoding"),
    ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
    ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
    ("parallel_config", "use_ubatching", True, ".*microbatches"),
    ("cache_config", "cache_dtype", "fp8", "a KV cache in fp8"),
    ("compilation_config", "cudagraph_mode", Graphs(True), "CUDA graphs of whole steps"),
]


@pytest.mark.parametrize(("where", "field", "value", "said"), NEVER_SERVED)
def test_what_contexts_are_never_served_with_is_refused(where, field, value, said, monkeypatch):
    sizes = [f"{x}_parallel_size" for x in ("pipeline", "decode_context", "prefill_context")]
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**dict.fromkeys(sizes, 1), use_ubatching=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=Graphs(False)),
        model_config=SimpleNamespace(dtype=torch.float32),
        speculative_config=None,
        lora_config=None,
    )
    groups = SimpleNamespace(kv_cache_groups=[None])
    check_serving(config, groups)
    setattr(getattr(config, where) if where else config, field, value)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match=f"cannot be served with {said}.* and the .*in Rust"):
        check_serving(config, groups)


def test_weights_are_found_where_the_hub_lists_files_that_the_engine_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    home, revision = tmp_path / "models--o--m", "a" * 40
    listed = {name: {"size": 1, "blob_id": "x"} for name in ("model.safetensors", "x.onnx")}
    for name, text in {
        "refs/main": revision,
        f"snapshots/{revision}/model.safetensors": "",
        f"trees/{revision}.json": json.dumps({"format_version": 1, "files": listed}),
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    assert checkpoint_folder("o/m", None) == home / "snapshots" / revision
    assert checkpoint_folder("o/other", None) is None
