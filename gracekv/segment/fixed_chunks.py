"""`fixed_chunks`: slots of a fixed number of tokens, counted from the left."""

from __future__ import annotations

import torch

from gracekv.prefill import Prefill, Region
from gracekv.registry import bounded
from gracekv.segment.base import SEGMENTERS, Partition, Segmenter


@SEGMENTERS.register("fixed_chunks", works_sharded=True)
class FixedChunks(Segmenter):
    """Chunks of 10 tokens from the left; the last one may be shorter (ChunkKV).

    Source: Liu et al. (2025), ChunkKV, arXiv:2502.00299.

    Cost: none; no tensor is read.

    Attributes:
        size: tokens per chunk (ChunkKV's 10).
    """

    size: int = bounded(10, at_least=1, hint="It is in tokens; ChunkKV's is 10.")

    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The partition; curvature is left to the trees. `ShapeError` if `region` is empty."""
        starts = torch.arange(region.start, region.end, self.size)
        return Partition(torch.cat([starts, torch.tensor([region.end])]))
