"""`full`: entries stay in the model's dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from gracekv.cache.base import RaggedCache
from gracekv.precision.base import PRECISIONS, Precision
from gracekv.prefill import Region


@final
@PRECISIONS.register("full")
@dataclass(frozen=True)
class FullPrecision(Precision):
    """Entries stay in the model's dtype, bit for bit.

    Source: the paper.

    Cost: none.
    """

    def __call__(self, cache: RaggedCache, starts: Iterable[Tensor], region: Region) -> RaggedCache:
        return cache
