"""Surprisal of every prompt token, without holding the logits of the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gracekv.kernels.linalg import capped, linear
from gracekv.prefill import Prefill, PromptSpans
from gracekv.prefill.observer import FinalAccumulator, FinalObserver, FinalRun
from gracekv.prefill.projection import plain_weight
from gracekv.prefill.spans import reflected

# Logits (positions x vocabulary entries) held at once, in float32: 2 MiB, which stays in a CPU's
# cache between the product that computes them and the sums that read them.
_BLOCK = 1 << 19
_ROWS = 512
# On a GPU large products are faster: 256 MiB.
_GPU_BLOCK = 1 << 26


@dataclass(frozen=True)
class Surprisal(FinalObserver):
    """-log p(x_i | x_<i) of every position, float32 [T]; position 0 gets 0.

    In a passage that follows packed entries, earlier positions mirror those of the passage.

    Source: Eq. (S6); the blocks: ours.
    """

    part = "surprisal"

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return (prefill.spans.length,)

    def accumulator(self, spans: PromptSpans) -> FinalAccumulator:
        return _Surprisal(spans)


class _Surprisal:
    def __init__(self, spans: PromptSpans) -> None:
        self._past, self._parts = spans.past, list[Tensor]()

    def add(self, run: FinalRun) -> None:
        self._parts.append(unlikelihood(run))

    def result(self) -> Tensor:
        whole = torch.nn.functional.pad(torch.cat(self._parts), (self._past + 1, 0))
        return reflected(whole, self._past)


@torch.no_grad()
def unlikelihood(run: FinalRun) -> Tensor:
    """-log p of the token that follows each of n positions, float32 [n]."""
    surprise = (_by_blocks if _is_plain(run.head) else _by_rows)(run).to(run.states.device)
    # Rounding must not make a certain token's surprisal negative.
    return surprise.clamp_(min=0)


def _is_plain(head: Any) -> bool:
    """Whether calling `head` only multiplies by its weight."""
    return (
        plain_weight(head) is not None
        and head.bias is None
        and not (head._forward_hooks or head._forward_pre_hooks)
        # A dispatcher that moves weights between devices replaces the instance's forward.
        and "forward" not in vars(head)
    )


def _by_blocks(run: FinalRun) -> Tensor:
    """Log-sum-exp over blocks of the vocabulary."""
    weight = run.head.weight[: run.vocabulary]
    device = weight.device
    # Under autocast the dtypes may differ.
    states, following = run.states.to(weight), run.following.to(device)
    block = _GPU_BLOCK if device.type == "cuda" else _BLOCK
    parts = []
    for rows, targets in zip(states.split(_ROWS), following.split(_ROWS), strict=True):
        columns = weight.split(max(1, block // len(rows)))
        logits = (capped(linear(rows, some).float(), run.softcap) for some in columns)
        sums = torch.stack([some.logsumexp(dim=-1) for some in logits]).logsumexp(dim=0)
        chosen = (rows.float() * weight[targets].float()).sum(dim=-1)
        parts.append(sums.sub_(capped(chosen, run.softcap)))
    return torch.cat(parts)


def _by_rows(run: FinalRun) -> Tensor:
    """Complete rows of logits, for heads that are not plain products (quantised, offloaded ...)."""
    parts = []
    size = max(1, 16 * _BLOCK // run.vocabulary)
    for rows, targets in zip(run.states.split(size), run.following.split(size), strict=True):
        if plain_weight(run.head) is not None:
            rows = rows.to(run.head.weight.dtype)
        logits = capped(run.head(rows[None])[0].float(), run.softcap)
        chosen = logits.gather(-1, targets.to(logits.device)[:, None])[:, 0]
        parts.append(logits.logsumexp(dim=-1) - chosen)
    return torch.cat(parts)
