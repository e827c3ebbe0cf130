"""How far a token's key points away from the mean direction of all keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.prefill import Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("key_difference")
@dataclass(frozen=True, slots=False)
class KeyDifference(Scorer):
    """1 - cos(k, mean of the normalised keys): what is unlike the rest stays (KeyDiff).

    The mean is over prefix and context; nothing after the context is read, and no query.

    Source: Park et al. (2025), KeyDiff, arXiv:2504.15364. Ours: one eviction after prefill instead
    of one a block.

    Cost: two passes over the keys.
    """

    works_sharded: ClassVar[bool] = True

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """One minus the cosine, between 0 and 2."""
        device, seen = prefill.keys[0].device, slice(prefill.spans.past, prefill.spans.context_end)

        def layer(keys: Tensor) -> Tensor:
            unit = functional.normalize(keys.float(), dim=-1)
            mean = functional.normalize(unit[:, seen].mean(dim=1, keepdim=True), dim=-1)
            likeness = (unit[:, region.start : region.end] * mean).sum(dim=-1)
            return (1 - likeness).clamp_min(0).to(device)

        return TokenScores.from_scores(
            torch.stack([layer(keys) for keys in prefill.keys]), shard=prefill.shard
        )
