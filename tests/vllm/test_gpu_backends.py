"""vLLM's attention for GPUs with contexts next to its pages, as far as testable without a GPU."""

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gracekv.errors import ConfigError
from gracekv.vllm import kv_transfer_config, request
from support.engine_answers import assert_same_logprobs, check_answer, own_logprobs
from support.fresh_python import fresh_python

pytestmark = pytest.mark.vllm

NAMES = ("FLASH_ATTN", "TRITON_ATTN")
TESTS = str(Path(__file__).parents[1])


def pairs():
    """The stock backend and ours, by name."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from gracekv.vllm.serving import GPU

    assert set(GPU) == set(NAMES)
    paths = {name: (AttentionBackendEnum[name].value, GPU[name]) for name in NAMES}
    return {name: tuple(map(resolve_obj_by_qualname, pair)) for name, pair in paths.items()}


def see_gpu(monkeypatch, most):
    """Let vLLM see a GPU whose compute capability is up to `most`."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda _: False)
    monkeypatch.setattr(platform, "is_cuda", lambda _: True)
    monkeypatch.setattr(platform, "has_device_capability", classmethod(lambda _, x: x <= most))


@pytest.mark.parametrize("name", NAMES)
def test_vllms_classes_are_as_the_subclasses_take_them(name):
    stock, ours = pairs()[name]
    assert issubclass(ours, stock)
    assert ours.get_name() == stock.get_name() == name
    assert ours.get_builder_cls() is stock.get_builder_cls()
    impl, stock_impl = ours.get_impl_cls(), stock.get_impl_cls()
    assert issubclass(impl, stock_impl)
    assert not getattr(impl, "__abstractmethods__", None)
    assert list(inspect.signature(impl.forward).parameters) == list(
        inspect.signature(stock_impl.forward).parameters
    )
    # Keys and values are in pages before attention runs.
    assert stock.forward_includes_kv_cache_update is False
    assert "[num_blocks, num_kv_heads, block_size, 2 * head_size]" in stock_impl.forward.__doc__
    metadata = inspect.signature(stock_impl.forward).parameters["attn_metadata"].annotation
    read = {"query_start_loc", "seq_lens", "block_table", "max_seq_len", "num_actual_tokens"}
    assert read <= {field.name for field in dataclasses.fields(metadata)}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("chosen", [None, *NAMES])
def test_the_platform_for_gpus_selects_them(monkeypatch, capability, chosen):
    # The platform's own extension, which CPU builds lack and selection does not need.
    missing = "vllm._C_stable_libtorch"
    monkeypatch.setitem(sys.modules, missing, ModuleType(missing))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from gracekv.vllm import plugin
    from gracekv.vllm.serving import GPU

    found = DeviceCapability(*capability)
    see_gpu(monkeypatch, 80)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    plugin.register()
    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", classmethod(lambda _: found))
    states = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    config = AttentionSelectorConfig(**states, block_size=None, use_kv_connector=True)
    selected = chosen and registry.AttentionBackendEnum[chosen]
    assert CudaPlatformBase.get_attn_backend_cls(selected, config) == GPU[chosen or NAMES[0]]


def test_a_version_whose_scheduler_says_less_is_left_as_it_is(monkeypatch):
    from vllm.v1.attention.backends import registry
    from vllm.v1.core.sched.output import KVConnectorBlockState

    from gracekv.vllm import plugin

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delattr(KVConnectorBlockState, "get_block_ids")
    with pytest.warns(UserWarning, match="cannot serve contexts in vLLM .* blocks of requests"):
        plugin.register()
    assert not registry._ATTN_OVERRIDES


def test_older_gpus_keep_stock_attention(monkeypatch):
    from gracekv.vllm.serving import CPU, replacements

    assert replacements() == CPU
    see_gpu(monkeypatch, 75)
    assert replacements() == {}


def test_what_layers_have_decides_what_is_served():
    from gracekv.vllm.serving import attention_layers, check_attention

    def layers(backend):
        impl = object.__new__(backend.get_impl_cls())
        layer = SimpleNamespace(kv_cache=torch.empty(2, 2, 16, 64), impl=impl)
        found = {"model.layers.0.attn": layer, "model.rotary": object()}
        context = SimpleNamespace(static_forward_context=found)
        return attention_layers(SimpleNamespace(compilation_config=context))

    for stock, ours in pairs().values():
        name = stock.get_impl_cls().__name__
        with pytest.raises(ConfigError, match=f"by {name}.*--attention-backend FLASH_ATTN"):
            check_attention(layers(stock), 16)
        check_attention(layers(ours), 16)
        with pytest.raises(ConfigError, match="--block-size 16"):
            check_attention(layers(ours), 128)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("with_store", [True, False])
def test_graphs_of_whole_steps_are_for_engines_without_contexts(
    tiny_served, monkeypatch, mode, with_store
):
    """With contexts, vLLM records the parts between attention layers, which run as Python."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda _: True))
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda *_: None))
    store = KVTransferConfig(**kv_transfer_config(tiny_served.store)) if with_store else None
    graphs = {"mode": "VLLM_COMPILE", "cudagraph_mode": mode}
    options = {"dtype": "float32", "max_model_len": 256, "compilation_config": graphs}
    args = EngineArgs(model=str(tiny_served.folder), kv_transfer_config=store, **options)
    got = args.create_engine_config().compilation_config.cudagraph_mode.name
    assert got == ("PIECEWISE" if with_store and mode != "NONE" else mode)


@pytest.mark.long
@pytest.mark.parametrize(("name", "eager"), [("FLASH_ATTN", True), ("TRITON_ATTN", False)])
def test_an_engine_answers_as_gracekv(tiny_served, name, eager):
    """vLLM's own classes in a whole engine, once as Python, once traced as a compiled model."""
    contexts = list(tiny_served.results)
    command = ["-m", "support.gpu_backend_on_cpu", name, int(eager), tiny_served.folder]
    variables = {"TRITON_INTERPRET": "1", "VLLM_CPU_CI_ENV": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    done = fresh_python(*command, tiny_served.store, *contexts, **variables)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["impl"] == pairs()[name][1].get_impl_cls().__name__
    assert found["mode"] == ("NONE" if eager else "DYNAMO_TRACE_ONCE")
    *answers, plain = [answer(*one) for one in found["answers"]]
    for context, mine in zip(contexts, answers, strict=True):
        check_answer(tiny_served, context, "Why?", mine)
    with pytest.raises(AssertionError):
        check_answer(tiny_served, contexts[0], "Why?", plain)
    asked = request(tiny_served.store, contexts[0], "Why?", tiny_served.tokenizer).prompt_ids
    own = own_logprobs(tiny_served.model, list(asked), plain.token_ids, None)
    assert_same_logprobs(plain, *own, greedy=False)


def answer(ids, logprobs):
    steps = [{token: SimpleNamespace(logprob=x)} for token, x in zip(ids, logprobs, strict=True)]
    return SimpleNamespace(token_ids=ids, logprobs=steps)
