"""Random setups of a process and its model: answers equal the stock model's, and repeat."""

from contextlib import ExitStack
from random import Random

import torch

import gracekv
from gracekv.errors import GracekvError
from gracekv.testing.models import tiny_llama
from support.covering import cases
from support.prompts import IDS, PROMPT

SETUPS = cases(15, 2000)
# One or two of each kind: top-k, quotas, trees, merging, fits, codes, all layers, a second pass.
RECIPES = (
    "gracekv-plus", "gracekv-agnostic", "gracekv", "global-eviction", "snapkv", "ada-snapkv",
    "pyramidkv", "d2o", "attention-matching", "grkv", "critical-snapkv", "gracekv-plus-allocated",
    "snapkv-4bit", "layer-defensivekv", "kvzip-two-pass", "gracekv-draft", "fullkv-8bit",
)  # fmt: skip
CHOICES = {
    "weights": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "autocast": (None, torch.bfloat16, torch.float16),
    "default": (torch.float32, torch.bfloat16, torch.float64), "attention": ("sdpa", "eager"),
    "mode": ("enable_grad", "no_grad", "inference_mode"),
    # Dynamo takes seconds; tests/hf/test_compiled_models.py compiles other parts.
    "compiled": (False,) * 50 + (True,), "chunk": (None, 40), "stream": (None, False),
}  # fmt: skip
# Largest difference of logits whose standard deviation is about 1.
MARGIN = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}


def last_logits(model, ids, **options):
    return model(ids[None], **options).logits[0, -1].detach()


def entries(result):
    return [x for layer in result.packed.layers for x in layer.tensors().values()]


def check(recipe, weights, autocast, default, attention, mode, compiled, chunk, stream):
    model = tiny_llama(dtype=weights, attention=attention)
    # Autocast leaves float64 alone, and casts weights of the other 16-bit dtype.
    computes = autocast if autocast and weights != torch.float64 else weights
    options = gracekv.CaptureOptions(chunk=chunk, stream=stream)
    with ExitStack() as setup:
        setup.callback(torch.set_default_dtype, torch.float32)
        torch.set_default_dtype(default)
        if autocast is not None:
            setup.enter_context(torch.autocast("cpu", dtype=autocast))
        setup.enter_context(getattr(torch, mode)())
        want = last_logits(model, IDS)
        if compiled:
            torch.compiler.reset()
            model.model.layers[0].self_attn.compile(backend="eager")
        whole = gracekv.compress(model, PROMPT, ratio=1, capture=options)
        got = last_logits(model, IDS[-1:], past_key_values=whole.new_cache())
        assert float((got - want).abs().max()) <= MARGIN[computes]
        layer = whole.packed.layers[0]
        assert {layer.keys.dtype, layer.values.dtype} == {computes}
        one, other = (
            gracekv.compress(model, PROMPT, ratio=4, pipeline=recipe, capture=options)
            for _ in range(2)
        )
        assert all(map(torch.equal, entries(one), entries(other)))
        answer = one.generate_ids(4)
        assert answer.shape == (1, 4)
        assert answer.equal(other.generate_ids(4))
        kept = one.accounting
        assert kept.spent <= kept.budget or kept.budget_bytes


def test_random_setups_answer_as_the_stock_model(tally):
    for seed in range(SETUPS):
        rng = Random(seed)
        setup = {name: rng.choice(values) for name, values in CHOICES.items()}
        recipe = RECIPES[seed % len(RECIPES)]
        try:
            with tally:
                check(recipe, **setup)
        except GracekvError as error:
            tally.add(f"refused ({type(error).__name__})")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {recipe}, {setup}") from error
        else:
            tally.add("answered")
    assert tally.outcomes["answered"] > SETUPS * 0.9
