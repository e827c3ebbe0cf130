"""`none`: no cuts."""

from __future__ import annotations

from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("none", works_sharded=True)
class NoCut(Decoder):
    """Never cut: the cache grows with every token.

    Source: the paper.

    Cost: none.
    """

    def scores(self, held: HeldLayer) -> Tensor:
        return held.positions.float()
