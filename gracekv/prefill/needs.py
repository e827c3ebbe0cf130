"""`Needs`: data that strategies read from a prefill in addition to keys and values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.prefill.model_layers import (
    cache_dtype,
    compressed_layers,
    embeddings,
    head_sizes,
    other_layers,
    text_config,
)
from gracekv.prefill.observer import Observer
from gracekv.prefill.spans import PromptSpans, Region

# Size of the observation windows at the ends of prompt and context, kept by every capture.
_WINDOW = 32

QUERY_BYTES = 256 * 2**20
"""Default limit for the bytes of held queries, or a quarter of keys and values if that is more.
Source: ours."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Data that a strategy reads in addition to keys and values; `Pipeline.needs` is the union.

    Attributes:
        question_queries: number of last question positions whose queries are read, in every layer.
        last_queries: number of last positions of the prompt, and of the context, whose queries are
            read (observation windows); at least 32 are kept.
        prompt_samples: number of evenly spaced prompt positions whose queries are read, see
            `prompt_samples`.
        context_samples: numbers of evenly spaced positions of the context, without its recent
            window, whose queries are read, see `region_samples`.
        recent: size of that window, in tokens.
        later_queries: whether queries are read whose positions are known only after the pass
            (multi-hop seeds, evidence probes, likely words). They are held if that is cheap, else
            recomputed on request, see `gracekv.capture`.
        observers: capture anything else.
    """

    question_queries: int = 32
    last_queries: int = 0
    prompt_samples: int = 0
    context_samples: frozenset[int] = frozenset()
    recent: int = 0
    later_queries: bool = False
    observers: frozenset[Observer] = frozenset()

    @classmethod
    def observed(cls, *observers: Observer) -> Needs:
        """The observations of `observers`, and only the queries that every capture keeps."""
        return cls(observers=frozenset(observers))

    def __or__(self, other: Needs) -> Needs:
        """The union of both, with the larger of two numbers."""
        pairs = ((getattr(self, x.name), getattr(other, x.name)) for x in fields(self))
        return Needs(*(a | b if isinstance(a, frozenset) else max(a, b) for a, b in pairs))

    def window_positions(self, spans: PromptSpans) -> Tensor:
        """int64 [n] ascending: direct probes and observation windows, kept by every capture."""
        width, ends = max(_WINDOW, self.last_queries), (spans.length, spans.context_end)
        windows = (range(max(spans.past, end - width), end) for end in ends)
        probes = spans.direct_probes(self.question_queries, width)
        return torch.tensor(sorted({*probes, *itertools.chain(*windows)}))

    def known_positions(self, spans: PromptSpans) -> Tensor:
        """int64 [n] ascending: all positions known before the pass whose queries are read."""
        region = spans.region(self.recent)
        drawn = [region_samples(region, count) for count in sorted(self.context_samples)]
        drawn.append(prompt_samples(spans.length, self.prompt_samples))
        known: Tensor = torch.cat([self.window_positions(spans), *drawn]).unique()
        return known[known >= spans.past]


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Bytes per token over all layers, from a model's config.

    Attributes:
        kv: bytes of keys and values.
        queries: bytes of queries; those of one layer if layers are read one by one.
        again: whether queries can be recomputed later.
        at_once: share of keys and values that is held while the prompt is read: 1, or that of one
            layer and the kept entries if layers are read one by one.
        stream: bytes of residual stream and embeddings if they are held for all tokens.
        activations: one layer's activations for a running token: three rows of the MLP and three of
            the residual stream.
    """

    kv: int
    queries: int
    again: bool = True
    at_once: float = 1.0
    stream: int = 0
    activations: int = 0

    def held(self, length: int, queries: int) -> int:
        """Bytes held for a prompt of `length` tokens with the queries of that many positions."""
        return int(length * (self.kv * self.at_once + self.stream)) + queries * self.queries

    @classmethod
    def of(cls, model: Any, stays: float | None = None) -> CaptureSizes:
        """Sizes for `model`, in its dtype.

        Args:
            model: as for `capture`.
            stays: share of keys and values that is kept, if layers are read one by one; None if
                all layers are held.
        """
        heads, groups, dim = head_sizes(model)
        layers, size = len(compressed_layers(model)), cache_dtype(model).itemsize
        unit = layers * dim * size
        hidden = embeddings(model).embedding_dim
        inner = getattr(text_config(model), "intermediate_size", None) or 4 * hidden
        sizes = cls(
            kv=2 * groups * unit,
            queries=heads * unit,
            # Recomputing would need the states of uncompressed layers at all tokens.
            again=not other_layers(model),
            activations=3 * size * (inner + hidden),
        )
        if stays is None:
            return sizes
        stream = 2 * hidden * size
        at_once, queries = min(1.0, stays + 1 / layers), sizes.queries // layers
        return replace(sizes, again=False, at_once=at_once, queries=queries, stream=stream)


def held_positions(
    needs: Needs, spans: PromptSpans, sizes: CaptureSizes, memory_limit: int | None
) -> Tensor:
    """Positions whose queries the capture holds: int64 [n] ascending.

    All positions if some are known only later, otherwise those known before the pass, provided that
    their queries take at most `memory_limit` bytes. Failing that, only direct probes and
    observation windows; the rest is recomputed on request. If that is impossible, all that are
    needed.
    """
    everything, needed = torch.arange(spans.past, spans.length), needs.known_positions(spans)
    if not sizes.again:
        return everything if needs.later_queries else needed
    limit = max(QUERY_BYTES, spans.length * sizes.kv // 4) if memory_limit is None else memory_limit
    if needs.later_queries and len(everything) * sizes.queries <= limit:
        return everything
    return needed if len(needed) * sizes.queries <= limit else needs.window_positions(spans)


class PrefillReader:
    """A strategy that reads a prefill and declares what the capture must keep for it."""

    def needs(self) -> Needs:
        """The data read besides keys, values and the queries of direct probes; by default none."""
        return Needs()


def depth_layers(depths: Sequence[float], layers: int) -> tuple[int, ...]:
    """Relative depths to 0-based layers, min(floor(rho L), L-1), ascending without duplicates.

    The depth i / L is layer i, however the division rounds. Source: Eq. (S1).
    """
    return tuple(sorted({min(math.floor(rho * layers + 1e-9), layers - 1) for rho in depths}))


@functools.lru_cache(maxsize=16)
def prompt_samples(length: int, count: int) -> Tensor:
    """The last position of each of `count` equal parts of a prompt: int64 [min(count, T)].

    Cached, like that of `region_samples`: never write to it.

    Args:
        length: T, tokens.
        count: maximum number of positions, at least 0.
    """
    count = min(count, length)
    return (torch.arange(1, count + 1, device="cpu") * length) // max(1, count) - 1


@functools.lru_cache(maxsize=16)
def region_samples(region: Region, count: int) -> Tensor:
    """Evenly spaced positions of `region`, its ends included: int64 [n] ascending, absolute.

    Args:
        region: N tokens.
        count: maximum number of positions, at least 0.
    """
    count = min(count, region.length)
    spaced = torch.linspace(0, max(0, region.length - 1), count, dtype=torch.float32, device="cpu")
    return spaced.round().long() + region.start
