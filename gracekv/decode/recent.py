"""`recent`: the prompt and a window of the last tokens."""

from __future__ import annotations

from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("recent")
class Recent(Decoder):
    """Keep the prompt's entries and the last tokens.

    Source: StreamingLLM, arXiv:2309.17453. Ours: the whole prompt stays, not four tokens.

    Cost: none.

    Attributes:
        keep_prompt: whether the prompt's entries stay.
    """

    keep_prompt: bool = True

    def scores(self, held: HeldLayer) -> Tensor:
        return held.positions.float()
