"""`full`: entries stay in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.uploads import filled
from gracekv.precision.base import EXACT, PRECISIONS, Precision
from gracekv.prefill import Region


@PRECISIONS.register("full", works_sharded=True)
class FullPrecision(Precision):
    """Entries stay in the model's dtype, bit for bit.

    Source: the paper.

    Cost: none.
    """

    def widths(self, start: Tensor, region: Region) -> Tensor:
        return filled(1, EXACT, torch.uint8, start.device).expand(len(start))
