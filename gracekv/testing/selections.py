"""What every compressed cache of a fixed budget must hold, as checks for tests and plugins."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill


def kept_positions(run: Run, prefill: Prefill, layer: int, head: int) -> Tensor:
    """int64 [E]: context positions of one head's packed entries, in packing order."""
    spans = prefill.spans
    positions = run.cache.layers[layer].head(head)[2].long()
    inside = (positions >= spans.context_start) & (positions < spans.context_end)
    return positions[inside]


def check_selection(run: Run, prefill: Prefill, recent: int) -> None:
    """`check_run` of a run that must spend its budget to the last entry."""
    spent, budget = run.accounting.spent, run.accounting.budget
    if spent != budget:
        raise AssertionError(f"{spent} entries of a budget of {budget}")
    check_run(run, prefill, recent)


def check_run(run: Run, prefill: Prefill, recent: int | None = None) -> None:
    """Raise `AssertionError` unless the run kept to its budget and kept what it must.

    Every head holds the prefix, the last `recent` context tokens (default: the run's own recent
    window) and the suffix, prefix and suffix bit for bit with multiplicity 1; positions strictly
    rise; what was accounted for is there.
    """
    spans, accounting = prefill.spans, run.accounting
    recent = accounting.recent if recent is None else recent
    if accounting.spent > accounting.budget:
        raise AssertionError(f"{accounting.spent} entries of a budget of {accounting.budget}")
    covered = spans.length - 1
    fixed = [*range(spans.context_start), *range(spans.context_end, covered)]
    # Without a suffix the last context token is the one that decoding feeds again.
    window = range(spans.context_end - recent, min(spans.context_end, covered))
    fed_again = int(spans.context_end == spans.length)
    for layer, packed in enumerate(run.cache.layers):
        for head in range(packed.heads):
            where = f"layer {layer}, head {head}"
            keys, values, positions, log_m = packed.head(head)
            if bool((positions.diff() <= 0).any()):
                raise AssertionError(f"{where}: positions do not strictly rise")
            place = {int(position): i for i, position in enumerate(positions)}
            missing = [t for t in (*fixed, *window) if t not in place]
            if missing:
                raise AssertionError(f"{where}: positions {missing} are gone")
            rows = torch.tensor([place[t] for t in fixed], dtype=torch.int64)
            # Of a quantised layer they come in float32.
            same = all(
                torch.equal(got[rows].to(given), given)
                for got, given in (
                    (keys, prefill.keys[layer][head, fixed]),
                    (values, prefill.values[layer][head, fixed]),
                )
            )
            if not same or bool(log_m[rows].any()):
                raise AssertionError(f"{where}: prefix or suffix was changed")
            held = len(positions) - len(fixed) + fed_again
            if held != int(accounting.entries[layer, head]):
                raise AssertionError(
                    f"{where}: {held} context entries packed, {accounting.entries[layer, head]} "
                    f"accounted for"
                )


def check_best_tokens(run: Run, prefill: Prefill) -> None:
    """Raise `AssertionError` unless each head kept its best tokens, the earlier of equals, intact.

    For pipelines whose slots are tokens that stay or go. A head's number of tokens is taken as
    given; all of it is by rank under the run's own scores.
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
