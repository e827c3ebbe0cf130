"""`Fitter` changes kept entries but not which are kept; `ReferenceQueries`: what it fits to."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.quantised import batches
from gracekv.errors import NonFiniteError, ShapeError
from gracekv.kernels.uploads import filled
from gracekv.prefill import LayerCapture, Needs, Prefill, PrefillReader, Region
from gracekv.registry import Configurable, Registry, Strategy, bounded
from gracekv.value import Memory, Replay
from gracekv.value.repeated_attention import RepeatedQueries


@dataclass(frozen=True, slots=True, eq=False)
class QuerySet:
    """Q reference queries: those of the context, then of a second pass, then the tail.

    Attributes:
        positions: int64 [n], the prompt positions whose queries are replayed at its end.
        tail: the prompt's last positions, whose queries stay at their own positions.
        asked_at: int64 [Q] on the CPU, the position of each query: it sees the keys up to there.
        weights: float32 [Q], of sum 1.
        repeated: [H, R, d], queries of a second pass at their own positions, or None.
        within: the region of keys that count, without the sink, or None for all keys.
    """

    positions: Tensor
    tail: Region
    asked_at: Tensor
    weights: Tensor
    repeated: Tensor | None = None
    within: Region | None = None

    def rotated(self, capture: LayerCapture) -> Tensor:
        """float32 [G, n*Q, d]: the queries at `asked_at`, times the attention scale.

        Raises `MissingCaptureError` if one was not captured.
        """
        like, end, count = capture.queries, self.tail.end, len(self.asked_at)
        queries = like.new_empty(len(like), count, like.shape[2], dtype=torch.float32)
        replayed, tail = len(self.positions), count - self.tail.length
        if replayed:
            rope = capture.rope.moved(slice(0, end), end - 1)
            rope.rotate(capture.queries_at(self.positions), self.positions, queries[:, :replayed])
        if self.repeated is not None:
            queries[:, replayed:tail] = self.repeated
        queries[:, tail:] = capture.queries_at(range(self.tail.start, end))
        queries *= capture.scale
        return rearrange(queries, "(g n) q d -> g (n q) d", g=capture.kv_heads)


@dataclass(frozen=True)
class ReferenceQueries(Configurable):
    """Context queries, replayed at the prompt's end, and the prompt's last queries.

    With `repeat`, the queries of a real second pass replace or supplement the replayed ones. They
    see prefix and context, as in that pass.

    Attributes:
        replay: which context queries are replayed, and their weights.
        tail: how many of the prompt's last queries are used at their own positions.
        tail_share: the tail's share of the total weight, spread evenly.
        repeat: how many queries of a second pass over the context are used, evenly spaced; 0 for
            no second pass.
        repeat_share: their share of the weight without the tail's. 1 replays nothing.
        repeat_chunk: context tokens that are repeated at once; scorers with the same chunk share
            the second pass.
    """

    replay: Replay = field(default_factory=lambda: Replay(max_queries=64))
    tail: int = bounded(16, at_least=0)
    tail_share: float = bounded(0.4, at_least=0, at_most=1)
    repeat: int = bounded(0, at_least=0, hint="0: no second pass; Attention Matching's is 4096.")
    repeat_share: float = bounded(1.0, above=0, at_most=1)
    repeat_chunk: int = bounded(4096, at_least=1, hint="kvzip_two_pass has 2048.")

    @property
    def _replays(self) -> bool:
        return not self.repeat or self.repeat_share < 1

    def needs(self) -> Needs:
        """The queries of the context and of the tail."""
        needs = Needs(last_queries=self.tail)
        if self.repeat:
            needs |= Needs.observed(RepeatedQueries(self.repeat, self.repeat_chunk))
        return needs | self.replay.needs() if self._replays else needs

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P]: positions of the queries of all layers."""
        tail = torch.tensor(prefill.spans.last(self.tail), dtype=torch.int64)
        own = [self.replay.asks(prefill, region, memory)] if self._replays else []
        return torch.cat([*own, tail])

    def __call__(self, capture: LayerCapture, region: Region, memory: Memory) -> QuerySet:
        """The queries of one layer; raises `MissingCaptureError` without a needed second pass."""
        spans, repeated, count, repeated_share = capture.spans, None, 0, 0.0
        tail = Region(spans.last(self.tail).start, spans.length)
        share = self.tail_share if tail.length else 0.0
        if self.repeat:
            repeated = capture.observation(RepeatedQueries(self.repeat, self.repeat_chunk))
            count, repeated_share = repeated.shape[1], (1 - share) * self.repeat_share
        positions, weights = (torch.zeros(0, dtype=x) for x in (torch.int64, torch.float32))
        if self._replays:
            replay_share = 1 - share - repeated_share
            positions, weights = self.replay.select_queries(capture, region, memory, replay_share)
        alike = (count, repeated_share), (tail.length, share)
        each = [filled(n, total / n, weights.dtype, weights.device) for n, total in alike if n]
        weights = torch.cat([weights, *each])
        asked_at, first = torch.full((len(weights),), spans.length - 1), len(positions)
        asked_at[first : first + count] = spans.context_end - 1
        asked_at[first + count :] = torch.arange(tail.start, tail.end)
        return QuerySet(positions, tail, asked_at, weights, repeated)


# Bytes of float32 values that are compared at once on a GPU.
_BATCH = 64 * 2**20


class Fitter(PrefillReader, Strategy, abc.ABC):
    """Fit the kept entries so that attention over them matches attention over all tokens.

    There are two steps: `reference` records the outputs of a layer while it is complete, and
    `layer` fits the kept entries after the rest is dropped. Positions and the number of entries do
    not change, nor do keys unless a strategy documents it. Entries outside the compressible region
    (prefix, recent window, question) stay bitwise equal. Deterministic; computed in float32 or
    better; values are converted back to the cache's dtype. Finite values stay finite.

    Attributes:
        by_score: whether each reference, which must be a dataclass, gets the scores that chose the
            entries, as its field `scores`.
    """

    by_score: ClassVar[bool] = False

    @property
    def compares_layers(self) -> bool:
        """Whether `reference` of a layer depends on the layers above it."""
        return False

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P] on the CPU: positions whose queries `reference` reads.

        Not called layer by layer, see `Scorer.asks`.
        """
        return torch.zeros(0, dtype=torch.int64)

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Any:
        """The record of one layer that `layer` needs; arguments as for `Scorer.layer`."""
        return None

    @abc.abstractmethod
    def layer(self, packed: RaggedEntries, reference: Any, region: Region) -> RaggedEntries:
        """The entries of one layer, with those of `region` fitted."""

    def layers(self, cache: RaggedCache, references: list[Any], region: Region) -> RaggedCache:
        """Fit all layers; removes their `references` from the list, which frees them."""
        pairs = ((layer, references.pop(0)) for layer in cache.layers)
        fitted = (self.layer(layer, x, region) if layer.entries else layer for layer, x in pairs)
        return replace(cache, layers=tuple(fitted))


FITTERS = Registry("fit", "how kept entries compensate for dropped ones", Fitter)


def check_dtype(strategy: Strategy, packed: RaggedEntries, fitted: RaggedEntries) -> None:
    """Raise `ShapeError` unless the values of `fitted` have the dtype of `packed`."""
    if fitted.values.dtype != (dtype := packed.values.dtype):
        raise ShapeError(
            f"The strategy {strategy.name!r} returned values of {fitted.values.dtype} for a cache "
            f"of {dtype}. Convert them: values.to(packed.values.dtype)."
        )


def value_change(packed: RaggedCache, fitted: RaggedCache) -> Tensor:
    """|v' - v| / |v| of every entry in percent: uint8 [E] on the CPU, layer after layer.

    255 stands for 2.55 and more. Raises `NonFiniteError` if a value became NaN or infinite.
    """
    changes = []
    for some in batches(packed.layers, lambda layer: 4 * layer.values.numel(), _BATCH):
        pair = packed.layers[some], fitted.layers[some]
        old, new = (torch.cat([x.values for x in layers]) for layers in pair)
        dtype = torch.promote_types(old.dtype, torch.float32)
        norm = torch.linalg.vector_norm(old, dim=-1, dtype=dtype)
        moved = torch.linalg.vector_norm(new.to(dtype) - old, dim=-1)
        changes.append((moved / norm.clamp_min_(1e-12)).to(packed.layers[0].device))
    hundredths = torch.cat(changes).mul_(100).round_().cpu()
    # Norms of finite values may be infinite.
    odd = not bool(hundredths.isfinite().all())
    if odd and not all(bool(x.values.isfinite().all()) for x in fitted.layers):
        raise NonFiniteError("Fitted values hold NaN or infinity. Check the fitter for overflow.")
    return hundredths.nan_to_num_(255, 255).clamp_(max=255).to(torch.uint8)
