"""`none`: nothing is cut."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("none")
class NoCut(Decoder):
    """Nothing is cut: the cache grows by every token.

    Source: the paper.

    Cost: none.
    """

    works_sharded: ClassVar[bool] = True

    def scores(self, held: HeldLayer) -> Tensor:
        return held.positions.float()
