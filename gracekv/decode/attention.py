"""`attention`: the attention of the last interval's queries."""

from __future__ import annotations

from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer
from gracekv.registry import bounded


@DECODERS.register("attention")
class Attention(Decoder):
    """Keep the entries with the most attention from the last interval's queries, on average.

    Source: the score of SnapKV, arXiv:2404.14469, with a decoder's own queries. Ours: queries are
    rotated to the current position, and all layers and heads share one auction.

    Cost: attention of the recorded queries over all entries, at each cut.

    Attributes:
        queries: how many of the last queries score the entries.
        keep_prompt: whether the prompt's entries stay.
    """

    queries: int = bounded(64, at_least=1)
    keep_prompt: bool = False

    def scores(self, held: HeldLayer) -> Tensor:
        return held.attention().mean(dim=1)
