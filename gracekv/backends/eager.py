"""One head at a time in float32, straight from the definition; on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, AttentionBackend, Partial, sequence_of_row
from gracekv.cache.entries import LayerEntries
from gracekv.kernels.logits import capped


@final
@BACKENDS.register("eager")
@dataclass(frozen=True, slots=False)
class Eager(AttentionBackend):
    """Loops over heads in float32, on any device; slow, for checks.

    Source: Eq. (T4): log m is added to the logit.

    Cost: a Python loop over sequences and heads.
    """

    reads_codes: ClassVar[bool] = True
    takes_softcap: ClassVar[bool] = True
    takes_sink_logits: ClassVar[bool] = True

    def prepare(self, layer: LayerEntries) -> LayerEntries:
        return layer

    def held_bytes(self, prepared: LayerEntries) -> int:
        return 0

    def packed(
        self,
        query: Tensor,
        prepared: LayerEntries,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
    ) -> Partial:
        batch, heads, tokens, _ = query.shape
        group = heads // prepared.heads
        of_row = sequence_of_row(rows, batch, prepared.sequences, query.device)
        output = torch.zeros_like(query)
        lse = query.new_full((batch, heads, tokens), -math.inf, dtype=torch.float32)
        for sequence in range(prepared.sequences):
            of_sequence = of_row == sequence
            for head in range(heads):
                keys, values, _, log_multiplicity = prepared.head(head // group, sequence)
                logits = capped(scale * query[of_sequence, head].float() @ keys.float().T, softcap)
                mixed, total = _attend(logits + log_multiplicity, values.float())
                output[of_sequence, head], lse[of_sequence, head] = mixed.to(query.dtype), total
        return Partial(output, lse)

    def tail(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        softcap: float | None = None,
    ) -> Partial:
        group = query.shape[1] // keys.shape[1]
        bias = additive_mask(mask, query.shape[2], keys.shape[2], query.device)
        parts = []
        for head in range(query.shape[1]):
            k, v = keys[:, head // group].float(), values[:, head // group].float()
            logits = capped(scale * query[:, head].float() @ k.mT, softcap)
            parts.append(_attend(logits + bias[:, 0], v))
        return _stack(parts, query)


def additive_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """The tail's mask as float32 [B or 1, 1, Tq, S] to add to logits.

    Args:
        mask: bool (True: seen) or additive float [B, 1, Tq, S]; None is causal, aligned at the end.
        queries: Tq.
        keys: S.
        device: where to build the causal mask.
    """
    if mask is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        mask = seen[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
    return mask.float()


def _attend(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, Tq, d] and lse [B, Tq] of logits [B, Tq, E] over values [E, d] or [B, E, d]."""
    # A row that sees nothing has lse -inf; its softmax would be NaN where the answer is 0.
    lse = torch.logsumexp(logits, dim=-1)
    weights = (logits - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp()
    return weights @ values, lse


def _stack(parts: list[tuple[Tensor, Tensor]], query: Tensor) -> Partial:
    output = torch.stack([output for output, _ in parts], dim=1).to(query.dtype)
    return Partial(output, torch.stack([lse for _, lse in parts], dim=1))
