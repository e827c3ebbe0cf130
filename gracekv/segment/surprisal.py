"""Surprisal of every prompt token, without ever holding the logits of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gracekv.kernels.linalg import linear
from gracekv.kernels.logsumexp import logsumexp
from gracekv.prefill import PromptSpans
from gracekv.prefill.observer import FinalAccumulator, FinalObserver, FinalRun, Part, Sizes
from gracekv.prefill.past import reflected
from gracekv.prefill.projection import plain_weight

# Logits (positions x vocabulary entries) held at once, in float32: 4 MiB, which stays in a CPU's
# cache between the product that makes them and the sums that read them.
_BLOCK = 1 << 20
_ROWS = 512
# On a GPU large products are faster: 256 MiB.
_GPU_BLOCK = 1 << 26


@dataclass(frozen=True)
class Surprisal(FinalObserver):
    """-log p(x_i | x_<i) of every position, float32 [T]; position 0 gets 0.

    Of a passage that follows packed entries, what was read before is taken to be like the passage.

    Source: Eq. (S6); the blocks: ours.
    """

    part: ClassVar[Part] = "surprisal"
    causal_axis: ClassVar[int | None] = 0

    def shape(self, sizes: Sizes) -> tuple[int | None, ...]:
        return (sizes.spans.length,)

    def accumulator(self, spans: PromptSpans) -> FinalAccumulator:
        return _Surprisal(spans)


class _Surprisal:
    def __init__(self, spans: PromptSpans) -> None:
        self._past, self._parts = spans.past, list[Tensor]()

    def add(self, run: FinalRun) -> None:
        self._parts.append(unlikelihood(run.states, run.head, run.following, run.vocabulary))

    def result(self) -> Tensor:
        whole = torch.nn.functional.pad(torch.cat(self._parts), (self._past + 1, 0))
        return reflected(whole, self._past)


@torch.no_grad()
def unlikelihood(final: Tensor, head: Any, following: Tensor, vocabulary: int) -> Tensor:
    """-log p of the token that follows each of n positions, float32 [n].

    Args:
        final: [n, D] the decoder's output, after its last norm.
        head: the module that makes logits of it.
        following: int64 [n].
        vocabulary: number of logits.
    """
    values = _by_blocks if _is_plain(head) else _by_rows
    surprise = values(final, head, following.to(final.device), vocabulary).to(final.device)
    # Rounding must not make a certain token's surprisal negative.
    return surprise.clamp_(min=0)


def _is_plain(head: Any) -> bool:
    """Whether calling `head` is nothing but a product with its weight."""
    return (
        plain_weight(head) is not None
        and head.bias is None
        and not (head._forward_hooks or head._forward_pre_hooks)
        # A dispatcher that moves weights between devices replaces the instance's forward.
        and "forward" not in vars(head)
    )


def _by_blocks(final: Tensor, head: Any, following: Tensor, vocabulary: int) -> Tensor:
    """Running log-sum-exp over blocks of the vocabulary."""
    weight = head.weight[:vocabulary]
    device = weight.device
    final, following = final.to(device), following.to(device)
    block = _GPU_BLOCK if device.type == "cuda" else _BLOCK
    parts = []
    for rows, targets in zip(final.split(_ROWS), following.split(_ROWS), strict=True):
        columns = weight.split(max(1, block // len(rows)))
        sums = logsumexp(linear(rows, some).float() for some in columns)
        chosen = (rows.float() * weight[targets].float()).sum(dim=-1)
        parts.append(sums.sub_(chosen))
    return torch.cat(parts)


def _by_rows(final: Tensor, head: Any, following: Tensor, vocabulary: int) -> Tensor:
    """Whole rows of logits, for heads that are not one plain product (quantised, offloaded ...)."""
    parts = []
    size = max(1, 8 * _BLOCK // vocabulary)
    for rows, targets in zip(final.split(size), following.split(size), strict=True):
        logits = head(rows).float()
        chosen = logits.gather(-1, targets.to(logits.device)[:, None])[:, 0]
        top = logits.amax(dim=-1, keepdim=True)
        total = logits.sub_(top).exp_().sum(dim=-1).log_()
        parts.append(total + top[:, 0] - chosen)
    return torch.cat(parts)
