"""The store: names stay inside it, damage is found, and memory is shared and bounded."""

import json
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import gracekv
from gracekv.errors import ConfigError, StoreError
from gracekv.testing.models import tiny_model
from gracekv.vllm import ContextStore, export, kv_transfer_config
from gracekv.vllm.model_facts import model_facts
from gracekv.vllm.serving import StoreOptions, check_serving
from gracekv.vllm.stored_context import heads_of_rank


@pytest.fixture(scope="module")
def model():
    return tiny_model(kv_heads=4)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    rng = torch.Generator().manual_seed(0)
    for number in range(3):
        ids = torch.randint(0, 97, (60,), generator=rng)
        prompt = gracekv.Prompt.from_ids(ids, (0, 50))
        export(gracekv.compress(model, prompt, ratio=2), root / f"c{number}")
    return root


@pytest.fixture
def root(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["../store/c0", "/etc", "", ".", "c0/..", None, 3, ["c0"], "c0\n"])
def test_no_name_leaves_the_store(root, name):
    with pytest.raises(StoreError, match="A context's name"):
        ContextStore(root).load(name)


def test_links_out_of_the_store_are_refused(root, tmp_path):
    (root / "c0").rename(tmp_path / "secret")
    (root / "c0").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="outside the store"):
        ContextStore(root).load("c0")


def cut(folder):
    path = folder / "entries.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder):
    path = folder / "entries.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))


def exchange(folder):
    shutil.copy(folder.parent / "c1" / "entries.safetensors", folder)


def edit(folder, **changes):
    path = folder / "header.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is damaged"),
        (flip, "is damaged"),
        (exchange, "do not belong together"),
        (lambda folder: (folder / "header.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "header.json").write_text("[]"), "another format"),
        (lambda folder: (folder / "header.json").unlink(), "There is no context"),
        (lambda folder: (folder / "entries.safetensors").unlink(), "is damaged"),
        (lambda folder: edit(folder, format=1), "another format"),
        (lambda folder: edit(folder, length="7"), "is damaged"),
        (lambda folder: edit(folder, more=1), "is damaged"),
        (lambda folder: edit(folder, length=7), "of other entries"),
        (lambda folder: edit(folder, model={"layers": None}), "is damaged"),
        (lambda folder: edit(folder, kind="round"), "is damaged"),
        (lambda folder: edit(folder, kind="equal"), "of other entries"),
    ],
)
def test_damage_is_found(root, damage, said):
    damage(root / "c0")
    for use in (ContextStore.load, ContextStore.verify):
        with pytest.raises(StoreError, match=said) as caught:
            use(ContextStore(root), "c0")
        # Clients of a server see the message; where its files lie is not theirs.
        assert str(root.parent) not in str(caught.value)


def test_an_engine_without_ragged_attention_takes_equal_shares_only(root, model):
    prompt = gracekv.Prompt.from_ids(torch.arange(60), (0, 50))
    equal = gracekv.compress(model, prompt, ratio=2, pipeline="gracekv-agnostic-equal")
    export(equal, root / "equal", shares="equal")
    store = ContextStore(root, ragged=False)
    with pytest.raises(StoreError, match=r"'c0' is ragged.*gracekv-agnostic-equal"):
        store.load("c0")
    assert store.load("equal").header.share == int(equal.packed.entries()[0, 0])


def test_contexts_of_other_models_are_refused(root):
    other = ContextStore(root, model=model_facts(tiny_model(kv_heads=4, seed=5)))
    with pytest.raises(StoreError, match=r"another model: weights \(.* first\) differ"):
        other.load("c0")
    facts = {"family": "llama", "layers": 30, "dtype": "bfloat16"}
    with pytest.raises(StoreError, match="layers, dtype differ"):
        ContextStore(root, model=facts).header("c0")


def test_entries_are_loaded_once_and_shared_by_threads(root, monkeypatch):
    store, reads, read = ContextStore(root), [], ContextStore._read
    monkeypatch.setattr(
        ContextStore, "_read", lambda self, *a: reads.append(a[0]) or read(self, *a)
    )
    found = []
    threads = [threading.Thread(target=lambda: found.append(store.load("c0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == ["c0"]
    assert len({id(context) for context in found}) == 1
    digest = found[0].header.digest
    shutil.rmtree(root / "c0")
    assert store.load("c0", digest) is found[0]


def test_verify_reads_again_only_what_changed(root, monkeypatch):
    store, reads, read = ContextStore(root), [], ContextStore._read
    monkeypatch.setattr(
        ContextStore, "_read", lambda self, *a: reads.append(a[0]) or read(self, *a)
    )
    assert store.verify("c0") == store.verify("c0")
    assert reads == ["c0"]
    flip(root / "c0")
    with pytest.raises(StoreError, match="damaged"):
        store.verify("c0")


def test_the_least_recently_used_is_dropped_but_not_what_must_stay(root):
    size = ContextStore(root).load("c0").bytes
    store = ContextStore(root, limit=2 * size + size // 2)
    first, second = store.load("c0"), store.load("c1")
    assert store.load("c0") is first
    store.load("c2")
    assert store.loaded_bytes <= 2.5 * size
    assert store.load("c0", first.header.digest) is first
    assert store.load("c1") is not second
    kept = store.load("c2")
    store.load("c0", keep=[kept.header.digest, store.load("c1").header.digest])
    assert store.load("c2") is kept


def test_a_replaced_context_is_not_mistaken_for_the_old_one(root):
    store = ContextStore(root)
    old = store.header("c0").digest
    shutil.rmtree(root / "c0")
    shutil.copytree(root / "c1", root / "c0")
    assert store.header("c0").digest != old
    with pytest.raises(StoreError, match="was replaced"):
        store.load("c0", old)


def test_each_rank_takes_its_heads(root):
    whole = ContextStore(root).load("c0")
    for size in (1, 2, 4, 8):
        seen = [heads_of_rank(4, size, rank) for rank in range(size)]
        assert sorted({head for a, b in seen for head in range(a, b)}) == [0, 1, 2, 3]
        assert {b - a for a, b in seen} == {max(1, 4 // size)}
        assert seen == sorted(seen)
    part = ContextStore(root, heads=(1, 3)).load("c0")
    for mine, layer in zip(part.layers, whole.layers, strict=True):
        assert mine.heads == 2
        for g in (0, 1):
            for a, b in zip(mine.head(g), layer.head(g + 1), strict=True):
                assert torch.equal(a, b)
    assert part.bytes < whole.bytes


def test_the_configuration_names_the_store(root):
    extra = kv_transfer_config(root, limit_bytes=10)["kv_connector_extra_config"]
    assert StoreOptions.of(extra) == StoreOptions(root, 10)
    assert StoreOptions.of(kv_transfer_config(root)["kv_connector_extra_config"]).limit is None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "must name the folder"),
        ({"store": "/nowhere/at/all"}, "is no folder"),
        ({"store": 3}, "must name the folder"),
        ({"store": ".", "limit": 3}, "takes 'store' and 'limit_bytes'"),
        ({"store": ".", "limit_bytes": 0}, "at least 1"),
        ({"store": ".", "limit_bytes": True}, "at least 1"),
    ],
)
def test_unusable_configurations_are_refused(extra, said):
    with pytest.raises(ConfigError, match=said):
        StoreOptions.of(extra)


@pytest.mark.parametrize(
    ("where", "field", "value", "said"),
    [
        ("", "lora_config", object(), "LoRA adapters"),
        ("", "speculative_config", object(), "speculative decoding"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("cache_config", "cache_dtype", "fp8", "a KV cache in fp8"),
    ],
)
def test_what_contexts_are_never_served_with_is_refused_by_name(where, field, value, said):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, use_ubatching=False,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.float32),
        speculative_config=None,
        lora_config=None,
    )  # fmt: skip
    groups = SimpleNamespace(kv_cache_groups=[None])
    check_serving(config, groups)
    setattr(getattr(config, where) if where else config, field, value)
    with pytest.raises(ConfigError, match=f"cannot be served with {said}"):
        check_serving(config, groups)
