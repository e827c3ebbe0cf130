"""`random`: the prompt, and tokens drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("random")
class Random(Decoder):
    """The prompt's entries and, of the others, as many as fit, drawn at random.

    Source: Random Attention, arXiv:2609.03430. Ours: draws are new at each cut, and every entry of
    every head has its own.

    Cost: none.

    Attributes:
        seed: of the draws; they depend on it, the layer and the position alone.
        keep_prompt: whether the prompt's entries stay.
    """

    seed: int = 0
    keep_prompt: bool = True

    def scores(self, held: HeldLayer) -> Tensor:
        rng = torch.Generator().manual_seed(hash((self.seed, held.number, held.now)) % 2**63)
        return torch.rand(held.positions.shape, generator=rng).to(held.keys.device)
