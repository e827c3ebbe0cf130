"""`uniform`: slots of nearly equal length, regardless of the content."""

from __future__ import annotations

import torch

from gracekv.prefill import Prefill, Region
from gracekv.registry import bounded
from gracekv.segment.base import SEGMENTERS, Partition, Segmenter


@SEGMENTERS.register("uniform", works_sharded=True)
class Uniform(Segmenter):
    """Slots of nearly equal length, as close to 64 tokens as the context allows.

    Source: the paper's ablation without curvature segmentation. Ours: a region whose length is not
    a multiple of the target is divided into N / target slots, rounded half up but at least one,
    whose lengths differ by at most one token.

    Cost: none; no tensor is read.

    Attributes:
        target_length: tokens per slot (the paper's 64).
    """

    target_length: int = bounded(64, at_least=1, hint="It is in tokens; the paper's is 64.")

    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The partition, without curvature; raises `ShapeError` if `region` is empty."""
        slots = max(1, (2 * region.length + self.target_length) // (2 * self.target_length))
        return Partition(region.start + torch.arange(slots + 1) * region.length // slots)
