"""`full`: entries stay in the model's dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gracekv.precision.base import EXACT, PRECISIONS, Precision
from gracekv.prefill import Region


@PRECISIONS.register("full")
class FullPrecision(Precision):
    """Entries stay in the model's dtype, bit for bit.

    Source: the paper.

    Cost: none.
    """

    works_sharded: ClassVar[bool] = True

    def widths(self, start: Tensor, region: Region) -> Tensor:
        return torch.full_like(start, EXACT, dtype=torch.uint8)
