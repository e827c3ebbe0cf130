"""What partitions and compressed caches must hold, as checks for tests and plugins."""

from __future__ import annotations

import torch

from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill, Region
from gracekv.segment.base import Partition


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


def check_partition(partition: Partition, region: Region, length: int) -> None:
    """Check that a segmenter's `partition` of `region` keeps the contract.

    `length` is T, the tokens of the whole sequence. Raises `AssertionError` with the first broken
    rule: int64 bounds on the CPU that strictly increase from the region's start
    to its end, and a curvature that is None or one finite float per token of the sequence.
    """
    bounds, kappa = partition.bounds, partition.curvature
    if bounds.dtype != torch.int64 or bounds.device.type != "cpu" or bounds.ndim != 1:
        raise AssertionError(
            f"bounds must be one-dimensional int64 on the CPU; got {bounds.ndim} dimensions of "
            f"{bounds.dtype} on {bounds.device}."
        )
    if (int(bounds[0]), int(bounds[-1])) != (region.start, region.end):
        raise AssertionError(f"bounds must run from end to end of {region}; got {bounds.tolist()}.")
    if bool((partition.lengths <= 0).any()):
        raise AssertionError(f"bounds must strictly increase; got {bounds.tolist()}.")
    if kappa is None:
        return
    if kappa.shape != (length,) or not kappa.is_floating_point():
        raise AssertionError(
            f"curvature must be float [{length}]; got {kappa.dtype} {list(kappa.shape)}."
        )
    if not bool(kappa.isfinite().all()):
        raise AssertionError("curvature must be finite.")
