"""Recomputed queries against those of a capture that holds them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gracekv
from gracekv.errors import MissingCaptureError
from gracekv.hf.capture import capture
from gracekv.prefill import Needs
from gracekv.prefill.options import CaptureOptions
from gracekv.testing import synthetic_prefill
from gracekv.testing.models import tiny_llama, tiny_model
from gracekv.value.column_sums import ReceivedAttention
from gracekv.value.expected_attention import QueryMoments
from support.capture_state import state
from support.prompts import random_prompt


def both(model):
    """Captures that hold later queries, and that recompute them."""
    for limit in (None, 0):
        options = CaptureOptions(memory_limit=limit)
        yield capture(model, random_prompt(200), Needs(later_queries=True), options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "rope"), [
    ("llama", "default"), ("llama", "dynamic"), ("mistral", "default"), ("qwen2", "yarn"),
    ("qwen3", "default"), ("phi3", "longrope"), ("gemma", "default"),
])  # fmt: skip
def test_queries_computed_again_are_those_of_the_pass(family, rope, attention):
    model = tiny_model(family, rope=rope, attention=attention, layers=3, original=128)
    held, lean = both(model)
    assert len(held.query_positions) == 200 > len(lean.query_positions)
    before, at = state(model), [0, 30, 7, 150, 199]
    view = lean.with_queries(at)
    assert state(model) == before
    assert view.query_positions.tolist() == sorted(at)
    got, want = ([x.queries_at(layer, at) for layer in range(3)] for x in (view, held))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@settings(max_examples=10)
@given(at=st.lists(st.integers(0, 199), min_size=1, max_size=30), layer=st.integers(0, 2))
def test_any_positions_of_one_layer(at, layer):
    model = tiny_llama(layers=3)
    held, lean = both(model)
    view = lean.with_queries(at, [layer])
    got, want = (x.queries_at(layer, at) for x in (view, held))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    if len(view.queries[layer - 1][0]) < len(view.query_positions):
        with pytest.raises(MissingCaptureError, match=f"Queries of layer {(layer - 1) % 3} "):
            view.queries_at((layer - 1) % 3, at)


def test_what_is_held_is_not_computed_again():
    _, prefill = both(tiny_llama())
    assert prefill.with_queries([199, 198]) is prefill
    assert prefill.with_queries(range(190, 200), [1]) is prefill
    whole = synthetic_prefill()
    assert whole.with_queries(range(whole.spans.length)) is whole


def test_without_a_model_missing_queries_are_named():
    import dataclasses

    full = synthetic_prefill()
    queries = tuple(x[:, 4:] for x in full.queries)
    lean = dataclasses.replace(full, queries=queries, query_positions=full.query_positions[4:])
    with pytest.raises(MissingCaptureError, match=r"positions \[1, 2\] were not .* needs\(\)\.$"):
        lean.with_queries([2, 1, 50])


def test_sums_over_all_queries_are_the_same_from_every_source(monkeypatch):
    from gracekv.prefill import base

    monkeypatch.setattr(base, "_PART", 64)
    model = tiny_llama(layers=3)
    needs = Needs.observed(ReceivedAttention(), QueryMoments(4))
    summed = capture(model, random_prompt(200), needs)
    for prefill in both(model):
        for observer, atol in ((ReceivedAttention(), 1e-4), (QueryMoments(4), 1e-3)):
            got, want = prefill.observe(observer), summed.observation(observer)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=atol)


def test_one_prefill_serves_windows_of_any_length():
    """Recipes sample the context without their window; a small budget makes it shorter."""
    model = tiny_model("gemma3_text", layers=4, window=64)  # its tokens cannot be run again
    prompt = gracekv.Prompt.from_ids(torch.arange(600) % 97, (4, 590))
    grkv = gracekv.Pipeline.named("grkv")
    prefill = capture(model, prompt, grkv.needs())
    for ratio in (2, 50):
        shared = gracekv.compress(model, prompt, prefill=prefill, pipeline=grkv, ratio=ratio)
        own = gracekv.compress(model, prompt, pipeline=grkv, ratio=ratio)
        assert torch.equal(shared.accounting.entries, own.accounting.entries)
