r"""Expected Attention: the attention that unknown future queries are expected to pay.

The queries of prefix and context, before rotation, are modelled as a Gaussian N(mu, Sigma) per
query head. A future query has one of the next positions; with R the mean of their rotations, its
logit with key k is Gaussian too, and

    E exp(logit) = exp(s k^T R mu + s^2 k^T R Sigma R^T k / 2),       s the attention scale.

These are normalised over the keys, averaged over a KV head's group, and multiplied by |v|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.observer import Accumulator, LayerObserver, TokenRun
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer

# Bytes of one block's largest float32 temporary, [H, block, d].
_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class QueryMoments(LayerObserver):
    """Mean and covariance (over n) of the queries of prefix and context before rotation.

    float32 [L, H, 1 + d, d]: of each query head the mean, then the rows of the covariance.

    Attributes:
        start: first position that counts; if the context ends before it, only its last one counts.
    """

    start: int

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.query_heads, 1 + prefill.head_dim, prefill.head_dim

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _QuerySums(self.seen(spans))

    def seen(self, spans: PromptSpans) -> Region:
        return Region(min(self.start, spans.context_end - 1), spans.context_end)


class _QuerySums:
    """Running sums of one layer's queries before rotation.

    Sums run in float64 over blocks of positions, centred on the first block's mean so that a large
    mean costs no precision.
    """

    def __init__(self, counted: Region) -> None:
        self._counted, self._count = counted, 0
        self._pivot = self._total = self._square = torch.empty(0, dtype=torch.float32)

    def add(self, run: TokenRun) -> None:
        first, last = max(self._counted.start, run.start), min(self._counted.end, run.end)
        if first >= last:
            return
        queries = run.queries[:, first - run.start : last - run.start]
        for some in queries.split(_block_rows(len(queries), queries.shape[2]), dim=1):
            at = torch.arange(first, first + some.shape[1], device=queries.device)
            plain, first = run.rope.unrotate(some.float(), at), first + some.shape[1]
            if not self._count:
                self._pivot = plain.mean(dim=1, keepdim=True)
                self._total = torch.zeros_like(self._pivot, dtype=torch.float64)
                self._square = self._total.transpose(1, 2) @ self._total
            rows = plain - self._pivot
            self._total += rows.sum(dim=1, keepdim=True, dtype=torch.float64)
            self._square += (rows.transpose(1, 2) @ rows).double()
            self._count += some.shape[1]

    def result(self) -> Tensor:
        """[H, 1 + d, d]; needs at least one query."""
        away = self._total / self._count
        covariance = self._square / self._count - away.transpose(1, 2) @ away
        return torch.cat([(self._pivot + away).float(), covariance.float()], dim=1)


@SCORERS.register("expected_attention", works_sharded=True)
class ExpectedAttention(Scorer):
    """Expected attention of unknown future queries times the value's norm; ignores the question.

    Nothing after the context is read: the statistics cover the prefix and the context, and future
    positions begin where the context ends.

    Source: Devoto et al. (2025), Expected Attention, arXiv:2510.00636, as in kvpress's
    ExpectedAttentionPress. Ours: rotations of future positions are continued from the captured
    table, and sinks inside the region score higher than all other tokens (other sinks are never
    compressed).

    Cost: one covariance of all queries per query head and its product with every key: O(L H N d²),
    about 5 % of a prefill at 4,096 tokens on a CPU.

    Attributes:
        future_positions: number of next positions that a query may have (512).
        sinks: number of first prompt tokens, excluded from the statistics and always kept (4).
        value_norm: multiply by |v|.
        epsilon: added to the expected attention before that (kvpress's default is 0).
    """

    removed_fields = (("covariance", True),)
    future_positions: int = bounded(512, at_least=1, hint="The published number is 512.")
    sinks: int = bounded(4, at_least=0, hint="The published number is 4.")
    value_norm: bool = True
    epsilon: float = bounded(0.0, at_least=0, hint="Its authors add 0.01.")

    def needs(self) -> Needs:
        """Statistics of the queries of the prefix and context."""
        return Needs.observed(QueryMoments(self.sinks))

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Expected attention times norm [G, N], not normalised.

        Raises `UnsupportedModelError` if the model caps its logits or adds sinks.
        """
        if capture.softcap is not None or capture.sinks is not None:
            raise UnsupportedModelError(
                "The scorer 'expected_attention' has a closed form for plain logits only; this "
                "model caps its logits or adds sinks to them. Use another scorer, such as "
                "'block_replay'."
            )
        seen = QueryMoments(self.sinks).seen(capture.spans)
        expected = torch.softmax(self._log_expected(capture, seen), dim=-1)
        score = reduce(expected, "g n t -> g t", "mean") + self.epsilon
        if self.value_norm:
            score *= capture.values[:, seen.start : seen.end].float().norm(dim=-1)
        whole = torch.nn.functional.pad(score, (seen.start, 0), value=float(score.max()) + 1)
        return whole[:, region.start : region.end]

    def _log_expected(self, capture: LayerCapture, seen: Region) -> Tensor:
        """log E exp(logit) of each key of `seen` for each query head: float32 [G, n, t]."""
        moments = capture.observation(QueryMoments(self.sinks)).to(capture.keys.device)
        mean, covariance = moments[:, 0], moments[:, 1:]
        dim, count, past = capture.head_dim, self.future_positions, capture.spans.past
        turn = mean_rotation(capture.rope, dim, seen.end, count, past).to(mean.device)
        mean = capture.scale * mean @ turn
        spread = 0.5 * capture.scale**2 * turn.T @ covariance @ turn
        keys = capture.keys[:, seen.start : seen.end]
        blocks = keys.split(_block_rows(capture.query_heads, dim), dim=1)
        mean = rearrange(mean, "(g n) d -> g n d", g=capture.kv_heads)
        spread = rearrange(spread, "(g n) i j -> g n i j", g=capture.kv_heads)
        logits = []
        for some in (block.float() for block in blocks):
            square = ((some[:, None] @ spread) * some[:, None]).sum(dim=-1)
            logits.append((mean @ some.mT).add_(square))
        return torch.cat(logits, dim=-1)


def mean_rotation(rope: Rope, dim: int, start: int, count: int, past: int = 0) -> Tensor:
    """float32 [d, d] M with x M = mean of R(t) x over t in [start, start + count), for rows x.

    The table ends with the prompt, and its first `past` rows may have any positions. R(p + n) =
    R(p) U^n, U the rotation by one position without the attention factor, so the mean is
    R(start - 1) times a mean of powers of U.
    """
    half = rope.cos.shape[1] // 2

    def row(at: int) -> Tensor:
        return torch.complex(rope.cos[at, :half].double(), rope.sin[at, :half].double())

    first, last, span = row(past), row(start - 1), 1
    step = torch.angle(row(past + 1) / first)
    while past and past + 2 * span < start:
        # A table in 16 bits is rounded except at position 0, so the angle is taken over many rows.
        span *= 2
        angle = torch.angle(row(past + span) / first)
        turns = ((span * step - angle) / (2 * torch.pi)).round()
        step = (angle + 2 * torch.pi * turns) / span
    ahead = torch.arange(1, count + 1, dtype=torch.float64, device=step.device)
    mean = torch.exp(1j * ahead[:, None] * step).mean(dim=0) * last
    c, s = torch.diag(mean.real), torch.diag(mean.imag)
    # (low, high, rest) -> (c low - s high, s low + c high, rest).
    turned = torch.cat([torch.cat([c, s], dim=1), torch.cat([-s, c], dim=1)])
    rest = torch.eye(dim - 2 * half, dtype=turned.dtype, device=turned.device)
    whole: Tensor = torch.block_diag(turned, rest)
    _, order = rope.in_halves(dim)
    if order is not None:
        back = order.argsort()
        whole = whole[back][:, back]
    return whole.float()


def _block_rows(heads: int, dim: int) -> int:
    """Number of positions n for which float32 [heads, n, dim] fills a block."""
    return max(64, _BLOCK // (4 * heads * dim))
