"""`tokens`: one slot per token."""

from __future__ import annotations

import torch

from gracekv.prefill import Prefill, Region
from gracekv.segment.base import SEGMENTERS, Partition, Segmenter


@SEGMENTERS.register("tokens", works_sharded=True)
class Tokens(Segmenter):
    """One slot per token, which turns the auction into token selection (ours).

    Source: ours; it makes eviction methods special cases of the trees.

    Cost: none; no tensor is read. It makes N L G trees of one node.
    """

    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The partition, without curvature; raises `ShapeError` if `region` is empty."""
        return token_slots(region)


def token_slots(region: Region) -> Partition:
    """One slot per token of `region`; raises `ShapeError` if it is empty."""
    return Partition(torch.arange(region.start, region.end + 1))
