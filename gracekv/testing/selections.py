"""Checks of partitions and compressed caches, for tests and plugins."""

from __future__ import annotations

import torch

from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill, Region
from gracekv.segment.base import Partition


def hold(promise: bool, broken: str) -> None:
    """Raise `AssertionError` with the sentence `broken` unless `promise`."""
    if not promise:
        raise AssertionError(broken)


def check_run(run: Run, prefill: Prefill, recent: int | None = None) -> None:
    """Raise `AssertionError` unless the run kept to its budget and kept what it must.

    Every head holds the prefix, the last `recent` context tokens (default: the run's own recent
    window) and the suffix, prefix and suffix bit for bit with multiplicity 1; positions strictly
    rise; what was accounted for is there.
    """
    spans, accounting = prefill.spans, run.accounting
    recent = accounting.recent if recent is None else recent
    spent, budget = accounting.spent, accounting.budget
    hold(spent <= budget, f"{spent} entries of a budget of {budget}")
    covered = spans.length - 1
    fixed = [*range(spans.context_start), *range(spans.context_end, covered)]
    # Without a suffix the last context token is the one that decoding feeds again.
    window = range(spans.context_end - recent, min(spans.context_end, covered))
    fed_again = int(spans.context_end == spans.length)
    for layer, packed in enumerate(run.cache.layers):
        for head in range(packed.heads):
            where = f"layer {layer}, head {head}"
            keys, values, positions, log_m = packed.head(head)
            hold(bool((positions.diff() > 0).all()), f"{where}: positions do not strictly rise")
            place = {int(position): i for i, position in enumerate(positions)}
            missing = [t for t in (*fixed, *window) if t not in place]
            hold(not missing, f"{where}: positions {missing} are gone")
            rows = torch.tensor([place[t] for t in fixed], dtype=torch.int64)
            same = not bool(log_m[rows].any())
            for got, states in ((keys, prefill.keys), (values, prefill.values)):
                given = states[layer][head, fixed]
                # Entries of a quantised layer come in float32.
                same &= torch.equal(got[rows].to(given), given)
            hold(same, f"{where}: prefix or suffix was changed")
            held, told = len(place) - len(fixed) + fed_again, int(accounting.entries[layer, head])
            hold(held == told, f"{where}: {held} context entries packed, {told} accounted for")


def check_partition(partition: Partition, region: Region, length: int) -> None:
    """Check that a segmenter's `partition` of `region` keeps the contract.

    `length` is T, the tokens of the whole sequence. Raises `AssertionError` with the first broken
    rule: int64 bounds on the CPU that strictly increase from the region's start
    to its end, and a curvature that is None or one finite float per token of the sequence.
    """
    bounds, kappa = partition.bounds, partition.curvature
    got = f"{bounds.dtype} {bounds.tolist()} on {bounds.device}"
    whole = bounds.dtype == torch.int64 and bounds.device.type == "cpu" and bounds.ndim == 1
    hold(whole, f"bounds must be one-dimensional int64 on the CPU; got {got}.")
    ends = int(bounds[0]), int(bounds[-1])
    hold(
        ends == (region.start, region.end),
        f"bounds must run from end to end of {region}; got {got}.",
    )
    hold(bool((partition.lengths > 0).all()), f"bounds must strictly increase; got {got}.")
    if kappa is not None:
        own = f"{kappa.dtype} {list(kappa.shape)}"
        fits = kappa.shape == (length,) and kappa.is_floating_point()
        hold(fits, f"curvature must be float [{length}]; got {own}.")
        hold(bool(kappa.isfinite().all()), "curvature must be finite.")
