"""Reference queries: the queries that decoding is expected to ask, with weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor

from gracekv.kernels.small_tensors import filled, on_device
from gracekv.prefill import LayerCapture, Needs, Prefill, Region
from gracekv.registry import Configurable, bounded
from gracekv.value import Memory, Replay
from gracekv.value.repeated_attention import RepeatedQueries


@dataclass(frozen=True, slots=True, eq=False)
class QuerySet:
    """Q reference queries.

    Attributes:
        positions: int64 [Q], the prompt positions that they come from.
        asked_at: int64 [Q] on the CPU, the position that each is asked from: it sees the keys up
            to there.
        weights: float32 [Q] on the device of `positions`, with sum 1.
        repeated: [H, R, d], queries of a second reading at their own places, which come before the
            Q - R queries that have `positions`; None if R is 0.
        within: the keys that count, without the sink, or None for all keys.
    """

    positions: Tensor
    asked_at: Tensor
    weights: Tensor
    repeated: Tensor | None = None
    within: Region | None = None

    def rotated(self, capture: LayerCapture) -> Tensor:
        """float32 [G, n*Q, d]: the queries at `asked_at`, times the attention scale.

        Raises `MissingCaptureError` if one was not captured.
        """
        queries = capture.queries_at(self.positions).float() * capture.scale
        rope, device = capture.rope, queries.device
        plain = rope.unrotate(queries, on_device(self.positions, device))
        to = self.asked_at[len(self.asked_at) - len(self.positions) :]
        asked = rope.rotate(plain, on_device(to, device))
        if self.repeated is not None:
            repeated = self.repeated.to(asked.device).float() * capture.scale
            asked = torch.cat([repeated, asked], dim=1)
        return rearrange(asked, "(g n) q d -> g (n q) d", g=capture.kv_heads)


@dataclass(frozen=True)
class ReferenceQueries(Configurable):
    """Replayed context queries, asked from the prompt's end, and the prompt's last queries.

    With `repeat`, the queries of a real second reading take the place of the replayed ones. They
    see prefix and context, as they did in that pass.

    Attributes:
        replay: which context queries are asked again, and how much each counts.
        tail: how many of the prompt's last queries are asked at their own places.
        tail_share: share of the total weight that the tail has, spread evenly.
        repeat: how many queries of a second pass over the context are used, evenly spaced; 0 for
            no second pass.
    """

    replay: Replay = field(default_factory=lambda: Replay(max_queries=64))
    tail: int = bounded(16, at_least=0)
    tail_share: float = bounded(0.4, at_least=0, at_most=1)
    repeat: int = bounded(0, at_least=0, hint="0: no second pass; Attention Matching's is 512.")

    def needs(self) -> Needs:
        """The queries of the context and of the tail."""
        own = Needs.observed(RepeatedQueries(self.repeat)) if self.repeat else self.replay.needs()
        return own | Needs(last_queries=self.tail)

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P]: positions of the queries of all layers."""
        tail = torch.tensor(prefill.spans.last(self.tail), dtype=torch.int64)
        if self.repeat:
            return tail
        return torch.cat([self.replay.asks(prefill, region, memory), tail])

    def __call__(self, capture: LayerCapture, region: Region, memory: Memory) -> QuerySet:
        """The queries of one layer; `MissingCaptureError` if there was no second pass to ask."""
        length, repeated = capture.spans.length, None
        if self.repeat:
            repeated = capture.observation(RepeatedQueries(self.repeat))
            asked = torch.full((repeated.shape[1],), capture.spans.context_end - 1)
            replayed, weights = (
                asked[:0],
                torch.full((len(asked),), 1 / len(asked), dtype=torch.float32),
            )
        else:
            replayed, weights = self.replay.select_queries(capture, region, memory)
            asked = torch.full((len(replayed),), length - 1)
        tail = torch.arange(capture.spans.last(self.tail).start, length)
        share = self.tail_share if len(tail) else 0.0
        each = share / max(1, len(tail))
        return QuerySet(
            torch.cat([replayed, on_device(tail, replayed.device)]),
            torch.cat([asked, tail]),
            torch.cat(
                [weights * (1 - share), filled(len(tail), each, weights.dtype, weights.device)]
            ),
            repeated,
        )
