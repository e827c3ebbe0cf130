"""`HeldLayer`, the entries of a layer at a cut, and `Decoder`, which chooses the ones that stay."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.kernels.linalg import batched_linear, capped, softmax
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class HeldLayer:
    """The entries of one layer of one sequence at a cut; heads are padded to N places.

    The packed entries come first, then the tokens since the last cut, both by position.

    Attributes:
        number: the layer's number among the compressed layers.
        keys: [G, N, d] in the model's dtype.
        values: [G, N, d].
        log_multiplicity: float32 [G, N]; -inf where there is no entry.
        positions: int64 [G, N].
        asked: float32 [G, n, Q, d], the last Q queries of each query head, times the scale.
        moved: float32 [G, n, Q, d], the same queries rotated to position `now`.
        carried: float32 [G, N], the score of an entry at an earlier cut or at the prompt's
            compression; 0 if there was none.
        prompt: positions below it belong to the prompt.
        now: position of the next token.
        softcap: as in `AttentionStep`.
        sink_logits: [H], as in `AttentionStep`.
        places: int64 [G, N], the positions that keys are rotated to; None if gaps are never closed,
            so that they equal `positions`.
    """

    number: int
    keys: Tensor
    values: Tensor
    log_multiplicity: Tensor
    positions: Tensor
    asked: Tensor
    moved: Tensor
    carried: Tensor
    prompt: int
    now: int
    softcap: float | None = None
    sink_logits: Tensor | None = None
    places: Tensor | None = None

    @property
    def used(self) -> Tensor:
        """bool [G, N]: True for entries, False for padding."""
        return self.log_multiplicity > -torch.inf

    def logits(self) -> Tensor:
        """float32 [G, n*Q, N]: logits of the moved queries, including log m; -inf in padding."""
        products = batched_linear(self.moved.flatten(1, 2), self.keys.float())
        return capped(products, self.softcap).add_(self.log_multiplicity[:, None])

    def sinks(self) -> Tensor:
        """float32 [G, n*Q]: the sink's logit for each row of `logits`; -inf without one."""
        heads, group, count, _ = self.moved.shape
        if self.sink_logits is None:
            return self.moved.new_full((heads, group * count), -torch.inf)
        return self.sink_logits.float().view(heads, group).repeat_interleave(count, dim=1)

    def attention(self) -> Tensor:
        """float32 [G, n*Q, N]: attention weights of the moved queries."""
        return softmax(self.logits(), None if self.sink_logits is None else self.sinks()[..., None])


class Decoder(Strategy, abc.ABC):
    """Chooses the entries that stay when a cache is cut to its limit during generation.

    Deterministic: the same entries give the same cut, and `random` depends only on its seed. Does
    not modify its arguments.

    Attributes:
        per_head: whether all heads keep the same number of entries; otherwise all layers and heads
            compete in one auction.
        queries: how many of the last queries are recorded.
        keep_prompt: whether all entries of the prompt stay.
    """

    per_head: ClassVar[bool] = False
    queries: int = 0
    keep_prompt: bool = False

    @abc.abstractmethod
    def scores(self, held: HeldLayer) -> Tensor:
        """float [G, N]: entries with higher scores stay. Scores are finite, in padding too."""

    def guarded(self, held: HeldLayer, most: int) -> Tensor:
        """bool [G, N]: entries that stay regardless of their score, at most `most` in all heads.

        Entries of a kept prompt do not count towards `most`.
        """
        return held.used & (held.positions < held.prompt) & self.keep_prompt

    def fit(self, held: HeldLayer, kept: Tensor, packed: RaggedEntries) -> RaggedEntries:
        """Return `packed` (the entries `kept` bool [G, N] of `held`) with new values or masses."""
        return packed


DECODERS = Registry("decode", "which entries stay while generating under a limit", Decoder)
