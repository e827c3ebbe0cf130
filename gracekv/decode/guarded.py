"""`guarded`: entries with values of large norm stay."""

from __future__ import annotations

from dataclasses import field
from operator import attrgetter

import torch
from torch import Tensor

from gracekv.decode.attention import Attention
from gracekv.decode.base import DECODERS, Decoder, HeldLayer
from gracekv.registry import bounded


@DECODERS.register("guarded")
class Guarded(Decoder):
    """Wrap another strategy and never drop the entries whose values have the largest norms.

    Source: the guard of VaSE, arXiv:2606.03928. Ours: the choice of the guarded entries.

    Cost: that of the strategy.

    Attributes:
        strategy: scores and fits the entries.
        share: share of a layer's budget for the entries with the largest value norms.
    """

    strategy: Decoder = field(default_factory=Attention)
    share: float = bounded(0.05, above=0, at_most=0.5)

    # Delegated to the strategy.
    scores = property(attrgetter("strategy.scores"))
    fit = property(attrgetter("strategy.fit"))
    per_head = property(attrgetter("strategy.per_head"))
    queries = property(attrgetter("strategy.queries"))
    keep_prompt = property(attrgetter("strategy.keep_prompt"))

    def guarded(self, held: HeldLayer, most: int) -> Tensor:
        norms = held.values.float().norm(dim=-1).masked_fill_(~held.used, -1.0)
        count = min(int(self.share * most) // len(norms), norms.shape[1])
        largest = torch.zeros_like(held.used)
        order = norms.argsort(dim=1, descending=True, stable=True)
        largest.scatter_(1, order[:, :count], value=True)
        return self.strategy.guarded(held, most) | (largest & held.used)
