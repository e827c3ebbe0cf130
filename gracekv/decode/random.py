"""`random`: the prompt, and a random sample of the other entries."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer


@DECODERS.register("random")
class Random(Decoder):
    """Keep the prompt's entries and a random sample of the others.

    Source: Random Attention, arXiv:2609.03430. Ours: each cut draws anew, independently for every
    entry of every head.

    Cost: none.

    Attributes:
        seed: draws depend only on the seed, the layer and the position.
        keep_prompt: whether the prompt's entries stay.
    """

    seed: int = 0
    keep_prompt: bool = True

    def scores(self, held: HeldLayer) -> Tensor:
        rng = torch.Generator().manual_seed(hash((self.seed, held.number, held.now)) % 2**63)
        drawn = torch.rand(held.positions.shape, generator=rng, dtype=torch.float32, device="cpu")
        return drawn.to(held.keys.device)
