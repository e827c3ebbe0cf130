"""`none`: nothing is cut."""

from __future__ import annotations

from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("none", works_sharded=True)
class NoCut(Decoder):
    """Nothing is cut: the cache grows by every token.

    Source: the paper.

    Cost: none.
    """

    def scores(self, held: HeldLayer) -> Tensor:
        return held.positions.float()
