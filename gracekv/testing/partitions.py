"""The contract of segmenters, as a check that plugins can run."""

from __future__ import annotations

import torch

from gracekv.prefill import Region
from gracekv.segment.base import Partition


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
