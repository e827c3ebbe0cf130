"""Compares one process's result with that of several, for tests of sharded models."""

import dataclasses

import torch

import gracekv
from gracekv.allocate.top_tokens import entry_gains
from support.margins import LOGITS, SCORES
from support.sharded_books import RATIO, TOKENS, positions
from support.sharded_process import PROMPTS

_STATES = ("keys", "values", "queries")


def whole(model, prompt=None, **options):
    """One process's result, after a check that rounding cannot change a choice."""
    options = {"ratio": RATIO, "keep_run": True} | options
    result = gracekv.compress(model, prompt or PROMPTS[0], **options)
    for run in result.details if isinstance(result.details, tuple) else (result.details,):
        if run.forest is not None:
            _assert_stable(model, result)
        elif run.selection is not None:
            _assert_clear(run)
    # In each step, the best logit leads by more than rounding.
    cache, ids = result.new_cache(), result.inputs["input_ids"]
    told = result.generate_ids(TOKENS)
    if len(ids) == 1:
        every = torch.cat([ids, told.view(1, -1)], dim=1)[:, cache.packed_length : -1]
        with torch.no_grad():
            logits = model(every, past_key_values=cache).logits[0]
        best = logits.double().topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > LOGITS
    return result


def _assert_clear(run):
    """No dropped token has a gain within rounding of a kept one that it competes with."""
    relevance, chosen = run.relevance, run.selection
    gains = (relevance.scores.double() * relevance.sensitivity.double()[..., None]).flatten(0, 1)
    kept = torch.zeros_like(gains, dtype=torch.bool)
    kept[chosen.head_of_entry(), chosen.start.long() - chosen.region[0]] = True
    assert torch.equal(gains[kept], entry_gains(relevance.scores, relevance.sensitivity, chosen))
    if kept.sum(1).unique().numel() > 1 + chosen.layers:  # one cut over all heads
        gains, kept = gains.view(1, -1), kept.view(1, -1)
    for gain, stays in zip(gains, kept, strict=True):
        low, high = float(gain[stays].min()), float(gain[~stays].max())
        # Max pooling gives neighbours the same score, on every path.
        assert low > high * (1 + SCORES) or low == high


def _assert_stable(model, result):
    """Slots, trees and auction give the same entries if everything captured is off by 1e-6."""
    rng = torch.Generator().manual_seed(0)
    prefill = gracekv.capture(model, result.prompt, result.pipeline.needs())

    def off(x):
        return x * (1 + 1e-6 * torch.randn(x.shape, generator=rng).clamp(-3, 3))

    for _ in range(2):
        near = dataclasses.replace(
            prefill,
            observed={x: off(seen) for x, seen in prefill.observed.items()},
            **{name: tuple(map(off, getattr(prefill, name))) for name in _STATES},
        )
        again = gracekv.compress(
            model, result.prompt, ratio=RATIO, pipeline=result.pipeline, prefill=near
        )
        assert positions(again.packed) == positions(result.packed)


def assert_same(found, want, ranks):
    """Entries, answers and numbers of all processes equal those of one that holds all heads."""
    for rank, mine in enumerate(found):
        own = rank % ranks
        for layers, expected in zip(mine["positions"], want["positions"], strict=True):
            for heads, all_heads in zip(layers, expected, strict=True):
                share = len(all_heads) // ranks
                assert heads == all_heads[own * share : (own + 1) * share]
        for name in want.keys() - {"positions"}:
            assert mine[name] == want[name], name
