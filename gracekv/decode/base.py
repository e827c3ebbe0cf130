"""What one layer holds at a cut, and the interface of strategies that say what stays."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.kernels.linalg import batched_linear
from gracekv.kernels.logits import capped
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class HeldLayer:
    """The entries of one layer of one sequence at a cut, its heads padded to N places.

    First come the packed entries, then the tokens since the last cut, both by position.

    Attributes:
        number: of the layer among those that are compressed.
        keys: [G, N, d] in the model's dtype.
        values: [G, N, d].
        log_multiplicity: float32 [G, N]; -inf where there is no entry.
        positions: int64 [G, N].
        asked: float32 [G, n, Q, d], the last Q queries of each query head, times the scale.
        moved: float32 [G, n, Q, d], the same turned to position `now`.
        carried: float32 [G, N], what earlier cuts, or the prompt's compression, made of an entry;
            0 where nothing is known.
        prompt: positions below it are the prompt's.
        now: the position of the token that comes next.
        softcap: as in `AttentionStep`.
        sink_logits: [H], as in `AttentionStep`.
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

    @property
    def used(self) -> Tensor:
        """bool [G, N]: where there is an entry."""
        return self.log_multiplicity > -torch.inf

    def logits(self) -> Tensor:
        """float32 [G, n*Q, N]: of the queries moved to now, with log m; -inf in padding."""
        products = batched_linear(self.moved.flatten(1, 2), self.keys.float())
        return capped(products, self.softcap).add_(self.log_multiplicity[:, None])

    def sinks(self) -> Tensor:
        """float32 [G, n*Q]: the sink's logit for each row of `logits`; -inf without one."""
        heads, group, count, _ = self.moved.shape
        if self.sink_logits is None:
            return self.moved.new_full((heads, group * count), -torch.inf)
        return self.sink_logits.float().view(heads, group).repeat_interleave(count, dim=1)

    def attention(self) -> Tensor:
        """float32 [G, n*Q, N]: what each query moved to now gives to each entry."""
        logits = self.logits()
        if self.sink_logits is None:
            return logits.softmax(-1)
        total = torch.logaddexp(logits.logsumexp(-1), self.sinks())
        return logits.sub_(total[..., None]).exp_()


class Decoder(Strategy, abc.ABC):
    """Which entries stay when a cache is cut to its limit while generating.

    Deterministic: the same entries give the same cut, and the draws of `random` depend on its seed
    alone. Writes into nothing that it is given.

    Attributes:
        per_head: whether every head keeps equally many entries; else one auction goes over all
            layers and heads.
        queries: how many of the last queries are recorded for it.
    """

    per_head: ClassVar[bool] = False
    queries: int = 0
    keep_prompt: bool = False

    @abc.abstractmethod
    def scores(self, held: HeldLayer) -> Tensor:
        """float [G, N]: entries of higher score stay; any finite number, also in padding."""

    def guarded(self, held: HeldLayer, most: int) -> Tensor:
        """bool [G, N]: entries that stay whatever their score, at most `most` in all heads.

        The prompt's, if it is kept, are not counted by `most`.
        """
        return held.used & (held.positions < held.prompt) & self.keep_prompt

    def fit(self, held: HeldLayer, kept: Tensor, packed: RaggedEntries) -> RaggedEntries:
        """`packed`, the entries kept bool [G, N] of `held`; values and masses may change."""
        return packed


DECODERS = Registry("decode", "what stays while generating under a limit", Decoder)
