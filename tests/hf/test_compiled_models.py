"""Models with parts compiled by `torch.compile` are read uncompiled, and answer as before."""

import pytest
import torch

import gracekv
from gracekv.hf import detach
from gracekv.testing.models import tiny_llama
from support.prompts import random_prompt

PROMPT = random_prompt(90, (4, 78))


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def part(name):
    def compiled(model):
        model.set_submodule(name, torch.compile(model.get_submodule(name), backend="eager"))
        return model

    compiled.__name__ = name
    return compiled


@pytest.fixture(scope="module")
def plain():
    return gracekv.compress(tiny_llama(), PROMPT, ratio=4)


def test_a_growing_cache_is_checked_while_the_model_runs_compiled():
    torch.compiler.reset()
    model, limit = tiny_llama(layers=1), gracekv.Limit(entries_per_head=42, every=16, window=8)
    result = gracekv.compress(model, PROMPT, ratio=4, backend="sdpa")
    for tokens, options in ((4, {"prompt_lookup_num_tokens": 3}), (30, {"limit": limit})):
        model._compiled_call_impl = None
        want = result.generate_ids(tokens, **options)
        in_place(model)
        assert torch.equal(result.generate_ids(tokens, **options), want)


# Dynamo takes seconds for each.
SLOW = [whole, in_place, forward, part("model"), part("model.layers.1")]
SLOW = [pytest.param(compiled, marks=pytest.mark.long) for compiled in SLOW]


@pytest.mark.parametrize("compiled", [part("model.layers.0.self_attn"), *SLOW])
def test_a_compiled_model_keeps_and_answers_what_it_does_uncompiled(compiled, plain):
    torch.compiler.reset()
    model = compiled(tiny_llama())
    result = gracekv.compress(model, PROMPT, ratio=4)
    for got, want in zip(result.packed.layers, plain.packed.layers, strict=True):
        assert torch.equal(got.positions, want.positions)
        assert torch.equal(got.keys, want.keys)
    assert result.generate_ids(4).tolist() == plain.generate_ids(4).tolist()
    detach(model)
    assert model.config._attn_implementation == "sdpa"
    # The model is compiled again afterwards.
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        model(PROMPT.ids[None])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
