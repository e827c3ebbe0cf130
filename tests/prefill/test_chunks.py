"""A capture in chunks against the same capture in one pass."""

from unittest.mock import Mock

import pytest
import torch

from gracekv.errors import CaptureMemoryError, ConfigError
from gracekv.hf.capture import EVERYTHING, capture
from gracekv.prefill import Needs, partial_attention
from gracekv.prefill.options import CaptureOptions
from gracekv.testing.models import tiny_llama, tiny_model
from gracekv.value.block_replay import BlockReplaySums
from gracekv.value.column_sums import ReceivedAttention
from gracekv.value.critical import WrittenNorms
from gracekv.value.expected_attention import QueryMoments
from support.capture_state import state
from support.observers import HeadOutputs
from support.prompts import random_prompt

NEEDS = EVERYTHING | Needs.observed(
    BlockReplaySums(64, 3.0), QueryMoments(4), ReceivedAttention(), WrittenNorms(), HeadOutputs()
)


def captured(model, chunk=None):
    return capture(model, random_prompt(200), NEEDS, CaptureOptions(chunk=chunk))


def tensors(prefill):
    states = {x: torch.stack(getattr(prefill, x)) for x in ("keys", "values", "queries")}
    observed = {repr(observer): seen for observer, seen in prefill.observed.items()}
    return {**states, **observed, "logits": prefill.logits, "cos": prefill.rope.cos}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "rope"), [
    ("llama", "default"), ("llama", "dynamic"), ("llama", "yarn"), ("mistral", "default"),
    ("qwen2", "longrope"), ("qwen3", "default"), ("phi3", "default"), ("phi3", "longrope"),
    ("gemma", "default"),
])  # fmt: skip
def test_chunks_give_what_one_pass_gives(family, rope, attention):
    model = tiny_model(family, rope=rope, attention=attention, layers=3, original=128)
    whole = tensors(captured(model))
    before = state(model)
    chunked = tensors(captured(model, 48))
    assert state(model) == before
    torch.testing.assert_close(chunked, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_a_chunk_attend_in_parts(attention, monkeypatch):
    model = tiny_model(layers=3, attention=attention)
    monkeypatch.setattr(partial_attention, "_ROWS", 32)
    made = [tensors(captured(model, chunk)) for chunk in (None, 90)]
    torch.testing.assert_close(made[1], made[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 199, 200, 1000])
def test_any_chunk_works(chunk):
    model = tiny_llama()
    whole, chunked = (tensors(captured(model, x)) for x in (None, chunk))
    torch.testing.assert_close(chunked, whole, rtol=1e-3, atol=1e-4)


def test_long_prompts_run_in_chunks_by_themselves():
    seen = []
    options = CaptureOptions(progress=lambda done, length: seen.append((done, length)))
    for length, ends in ((2500, (512, 1024, 1536, 2048, 2500)), (200, (200,))):
        capture(tiny_llama(layers=1), random_prompt(length), Needs(), options=options)
        assert seen == [(x, length) for x in ends]
        seen.clear()


def test_models_in_bfloat16_run_in_chunks():
    model = tiny_llama(dtype=torch.bfloat16)
    whole, chunked = (captured(model, chunk) for chunk in (None, 48))
    assert chunked.keys[0].dtype == torch.bfloat16
    # A product of another size may round the last bit of bfloat16 differently.
    torch.testing.assert_close(chunked.keys[0], whole.keys[0], rtol=0.01, atol=0.02)
    torch.testing.assert_close(chunked.keys[1], whole.keys[1], rtol=0.1, atol=0.2)


BAD_OPTIONS = [
    *(("chunk", 1, value) for value in (0, -1, 1.5, True, "8")),
    *(("memory_limit", 0, value) for value in (-1, 0.5, True, "1MiB")),
]


@pytest.mark.parametrize(("option", "least", "value"), BAD_OPTIONS)
def test_bad_options_are_refused(option, least, value):
    with pytest.raises(ConfigError, match=rf"{option} takes a whole number >= {least}; got"):
        CaptureOptions(**{option: value})


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_out_of_memory_leaves_the_model_as_it_was(error):
    model = tiny_llama(layers=3)
    before = state(model)
    hook = model.model.layers[1].register_forward_hook(Mock(side_effect=[None, error]))
    with pytest.raises(CaptureMemoryError, match=r"Capturing 200 tokens ran out .*chunk") as caught:
        capture(model, random_prompt(200), options=CaptureOptions(chunk=150))
    hook.remove()
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert "memory_limit=0" in str(caught.value)
    assert state(model) == before
    assert isinstance(caught.value, MemoryError)
    capture(model, random_prompt(200), options=CaptureOptions(chunk=150))


def test_other_errors_and_interrupts_pass_through():
    model = tiny_llama()
    before = state(model)

    for error in (KeyboardInterrupt("stop"), RuntimeError("something else")):
        options = CaptureOptions(chunk=50, progress=Mock(side_effect=error))
        with pytest.raises(type(error), match=str(error)):
            capture(model, random_prompt(200), Needs(), options=options)
        assert state(model) == before
