"""Checks of compressed caches that keep single tokens and spend their budget to the last entry."""

import torch
from torch import Tensor

from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill
from gracekv.testing.selections import check_run


def kept_positions(run: Run, prefill: Prefill, layer: int, head: int) -> Tensor:
    """int64 [E]: context positions of one head's packed entries, in packing order."""
    spans = prefill.spans
    positions = run.cache.layers[layer].head(head)[2].long()
    return positions[(positions >= spans.context_start) & (positions < spans.context_end)]


def check_selection(run: Run, prefill: Prefill, recent: int) -> None:
    """`check_run` for a run that must spend its budget to the last entry."""
    spent, budget = run.accounting.spent, run.accounting.budget
    if spent != budget:
        raise AssertionError(f"{spent} entries of a budget of {budget}")
    check_run(run, prefill, recent)


def check_best_tokens(run: Run, prefill: Prefill) -> None:
    """Raise `AssertionError` unless each head kept its best tokens, the earlier of equals, intact.

    For pipelines that keep or drop single tokens. The number of tokens per head is taken as given;
    all of them must be the best by the run's own scores.
    """
    if run.relevance is None or run.partition is None:
        raise AssertionError("a run that keeps everything selects nothing")
    origin, recent = run.partition.region.start, run.accounting.recent
    for layer, packed in enumerate(run.cache.layers):
        for head in range(packed.heads):
            count = int(run.accounting.entries[layer, head]) - recent
            scores = run.relevance.scores[layer, head].double()
            best = scores.sort(descending=True, stable=True).indices[:count] + origin
            got = kept_positions(run, prefill, layer, head)
            want = best.sort().values.to(got.device)
            chosen = got[got < run.partition.region.end]
            if not torch.equal(chosen, want[want < prefill.spans.length - 1]):
                raise AssertionError(f"layer {layer}, head {head}: not the {count} best tokens")
            keys, values, positions, log_m = packed.head(head)
            at = positions.long()
            if (
                not torch.equal(keys, prefill.keys[layer][head, at])
                or not torch.equal(values, prefill.values[layer][head, at])
                or bool(log_m.any())
            ):
                raise AssertionError(f"layer {layer}, head {head}: an entry was changed")
