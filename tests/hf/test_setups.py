"""Ordinary setups: dtypes of weights, autocast and gradient modes, against the stock model."""

import dataclasses
import itertools
from contextlib import ExitStack

import pytest
import torch

import gracekv
from gracekv.errors import CacheError
from gracekv.fit import LeastSquares, Regression, ValuesAndMass
from gracekv.testing.models import tiny_llama
from support.covering import covering

IDS = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 138), question_end=146)
# One of each kind: a top-k that streams, trees, a fit, codes, and a second pass.
RECIPES = (
    "gracekv-plus",
    "gracekv",
    "attention-matching",
    "gracekv-plus-allocated",
    "kvzip-two-pass",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AUTOCAST = (None, torch.bfloat16, torch.float16)
# Largest difference of logits whose standard deviation is about 1.
MARGIN = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}

SETUPS = covering(
    list(
        itertools.product(
            RECIPES, DTYPES, AUTOCAST, ("sdpa", "eager"), ("grad", "no_grad", "inference_mode")
        )
    )
)


def last_logits(model, ids, **options):
    return model(ids[None], **options).logits[0, -1].detach()


@pytest.mark.parametrize(("recipe", "dtype", "autocast", "attention", "mode"), SETUPS)
def test_each_setup_answers_as_the_stock_model(recipe, dtype, autocast, attention, mode):
    model = tiny_llama(dtype=dtype, attention=attention)
    with ExitStack() as setup:
        if autocast is not None:
            setup.enter_context(torch.autocast("cpu", dtype=autocast))
        if mode != "grad":
            setup.enter_context(getattr(torch, mode)())
        want = last_logits(model, IDS)
        whole = gracekv.compress(model, PROMPT, ratio=1)
        got = last_logits(model, IDS[-1:], past_key_values=whole.new_cache())
        # Computes in 16 bits: float64 is left as it is, and weights of other 16 bits are cast.
        computes = autocast if autocast and dtype != torch.float64 else dtype
        assert float((got - want).abs().max()) <= MARGIN[computes]
        assert {whole.packed.layers[0].keys.dtype, whole.packed.layers[0].values.dtype} == {
            computes
        }
        few = gracekv.compress(model, PROMPT, ratio=4, pipeline=recipe)
        assert few.accounting.spent <= few.accounting.budget or few.accounting.budget_bytes
        assert few.generate_ids(4).equal(few.generate_ids(4))


def test_a_result_of_autocast_is_saved_and_loaded_under_it(tmp_path):
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gracekv.compress(model, PROMPT, ratio=4)
        answer = result.generate_ids(6)
        result.save(tmp_path / "cache")
        assert gracekv.load(tmp_path / "cache", model).generate_ids(6).equal(answer)
    with pytest.raises(CacheError, match="autocast"):
        result.generate_ids(6)


@pytest.mark.parametrize("fit", [None, Regression(), LeastSquares(), ValuesAndMass()])
def test_a_fit_of_no_entries_changes_nothing(fit):
    # Without a prefix, one entry a head is that of the last token, which is fed again.
    prompt = gracekv.Prompt.from_ids(IDS[:40], (0, 40))
    pipe = gracekv.Pipeline.named("attention-matching")
    pipe = pipe if fit is None else dataclasses.replace(pipe, fit=fit)
    result = gracekv.compress(tiny_llama(), prompt, entries_per_head=1, pipeline=pipe)
    assert not result.packed.entries().any()
    assert result.generate_ids(2).shape == (1, 2)
