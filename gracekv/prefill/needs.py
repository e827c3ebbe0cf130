"""`Needs`: what the strategies of a pipeline read from a prefill beyond keys and values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.prefill.observer import Observer
from gracekv.prefill.prompt import PromptSpans, Region

# Queries that every capture keeps of the ends of prompt and context: observation windows.
_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Needs:
    """What a strategy reads from a prefill beyond keys and values; `Pipeline.needs` is the union.

    Attributes:
        question_queries: queries of this many last positions of the question, at every layer.
        last_queries: queries of this many last positions of the prompt, and as many of the
            context (observation windows); at least 32 are kept.
        prompt_samples: queries of this many evenly spaced positions of the prompt
            (`prompt_samples`).
        context_samples: queries of evenly spaced positions of the context without its recent
            window, for each of these counts (`region_samples`).
        recent: the size of that window, in tokens.
        later_queries: queries of positions that are known only after the pass (multi-hop seeds,
            evidence probes, likely words). They are held where that is cheap, else computed again
            when they are asked for: see `gracekv.capture`.
        observers: everything else.
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
        """What these observe, and no queries beyond those that every capture keeps."""
        return cls(observers=frozenset(observers))

    def __or__(self, other: Needs) -> Needs:
        """What both need; of numbers the larger."""
        sets = {
            name: getattr(self, name) | getattr(other, name)
            for name in ("context_samples", "observers")
        }
        numbers = {
            field.name: max(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if field.name not in sets
        }
        return Needs(**numbers, **sets)

    def window_positions(self, spans: PromptSpans) -> Tensor:
        """int64 [n] ascending: direct probes and observation windows, which every capture keeps."""
        width = max(_WINDOW, self.last_queries)
        windows = (
            range(max(spans.past, end - width), end) for end in (spans.length, spans.context_end)
        )
        probes = spans.direct_probes(self.question_queries, width)
        return torch.tensor(sorted({*probes, *itertools.chain(*windows)}))

    def known_positions(self, spans: PromptSpans) -> Tensor:
        """int64 [n] ascending: all whose queries are read and that are known before the pass."""
        region = spans.region(self.recent)
        known: Tensor = torch.cat(
            [
                self.window_positions(spans),
                prompt_samples(spans.length, self.prompt_samples),
                *(region_samples(region, count) for count in sorted(self.context_samples)),
            ]
        ).unique()
        return known[known >= spans.past]


class PrefillReader:
    """A strategy that reads a prefill: it says what the capture must keep for it."""

    def needs(self) -> Needs:
        """What it reads beyond keys, values and the direct probes' queries: nothing by default."""
        return Needs()


def depth_layers(depths: Sequence[float], layers: int) -> tuple[int, ...]:
    """Relative depths to 0-based layers, min(floor(rho L), L-1), ascending without duplicates.

    Source: Eq. (S1).
    """
    return tuple(sorted({min(math.floor(rho * layers), layers - 1) for rho in depths}))


def prompt_samples(length: int, count: int) -> Tensor:
    """The last position of each of `count` equal stretches of a prompt: int64 [min(count, T)].

    Args:
        length: T, tokens.
        count: most positions; 0: none.
    """
    count = min(count, length)
    return (torch.arange(1, count + 1) * length) // max(1, count) - 1


def region_samples(region: Region, count: int) -> Tensor:
    """Evenly spaced positions of `region`, its ends included: int64 [n] ascending, absolute.

    Args:
        region: N tokens.
        count: most positions; 0: none.
    """
    count = min(count, region.length)
    spaced = torch.linspace(0, max(0, region.length - 1), count).round().long()
    return spaced + region.start
