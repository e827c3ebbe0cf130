"""`unit`: a covered slot is worth 1, resolution nothing; the auction becomes a top-k on worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from einops import rearrange

from gracekv.tree.context import TreeContext, slot_batches
from gracekv.tree.distortion import DISTORTIONS, Distortion, TablePart
from gracekv.tree.workspace import Workspace


@final
@DISTORTIONS.register("unit")
@dataclass(frozen=True)
class Unit(Distortion):
    """D = 0 and D^drop = 1: rank by worth alone (score-based eviction).

    Source: ours, so that eviction methods are states of the same trees. Token worth stands in for
    the probe mass that picks extraction positions.
    """

    def parts(
        self, context: TreeContext, layers: Sequence[int], space: Workspace
    ) -> Iterator[TablePart]:
        device = context.prefill.keys[layers[0]].device
        tokens = context.tokens[list(layers)].to(device).flatten(0, 1)
        origin = context.partition.region.start
        for batch in slot_batches(context.partition, device):
            items, intervals = len(tokens) * len(batch.slots), batch.n * (batch.n + 1) // 2
            yield TablePart(
                batch=batch,
                distortion=torch.zeros(items, intervals, device=device),
                drop=torch.ones(items, device=device),
                mass=rearrange(tokens[:, batch.offsets(origin)], "u s n -> (u s) 1 n"),
            )
