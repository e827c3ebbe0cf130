"""`Relevance`, the interface of scorers, and the attention sums used by most of them."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import or_
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from einops import reduce
from torch import Tensor

from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import ConfigError, PluginError, ShapeError
from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.prefill import LayerCapture, Needs, Prefill, PrefillReader, PromptSpans, Region
from gracekv.registry import Registry, Strategy, bounded


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The score of every compressible token of every (layer, KV head).

    Attributes:
        scores: R^tok [L, G, N] float32, non-negative (the paper's R sums to 1 per head).
        seed_scores: S-hat [N] float32, one score per token for all heads; picks hop seeds and the
            evidence probes of the distortion.

    Raises `ShapeError` if the shapes of scores and seed_scores do not match.
    """

    scores: Tensor
    seed_scores: Tensor

    def __post_init__(self) -> None:
        if self.scores.ndim != 3 or self.seed_scores.shape != self.scores.shape[-1:]:
            raise ShapeError(
                f"TokenScores takes scores [L, G, N] and seed_scores [N]; got "
                f"{list(self.scores.shape)} and {list(self.seed_scores.shape)}."
            )


def mean_seed_scores(scores: Tensor, epsilon: float = 1e-12, shard: HeadShard = WHOLE) -> Tensor:
    """S-hat [N]: scores [L, G, N] averaged over all heads and normalised to sum 1.

    `epsilon` keeps the denominator from 0; scores that are 0 everywhere stay 0. The mean includes
    the heads of all processes of `shard`.

    Source: Eq. (V3), which averages direct relevance; using it for other scores is ours.
    """
    mean = shard.mean(scores.mean(dim=(0, 1)))
    return mean / (mean.sum() + epsilon)


def attention_sums(
    capture: LayerCapture,
    probes: Sequence[int] | Tensor,
    region: Region,
    weights: Tensor | None = None,
    *,
    power: float = 1.0,
    maximum: bool = False,
    over: Literal["sum", "mean", "max"] | None = None,
) -> Tensor:
    """sum_u w_u pi_{u,t}^power: weighted attention that each token receives, float32 [H, N].

    The softmax runs over all tokens up to the probe; its result is then sliced to the region.

    Args:
        capture: a layer of H query heads.
        probes: P absolute positions.
        region: the N tokens that are scored.
        weights: w [P], or None for equal weights of 1.
        power: exponent of attention, at least 1.
        maximum: maximum over probes instead of the sum.
        over: reduces the query heads of each KV head, to [G, N].

    Source: Eq. (V1); sums in blocks of probes are ours.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    args = {"power": power, "maximum": maximum, **capture.softmax_args}
    columns = softmax_columns(capture.queries_at(at), capture.keys, at + 1, weights, **args)
    inside = columns[:, region.start : region.end]
    return reduce(inside, "(g n) t -> g t", over, g=capture.kv_heads) if over else inside


def rank_scores(order: Tensor) -> Tensor:
    """Scores of ranked tokens: N, N - 1, ..., 1 over their sum; float32, same shape as `order`.

    Args:
        order: int64 [..., N], token indices from first to last.

    Source: ours.
    """
    ranks = torch.arange(order.shape[-1], 0, -1, dtype=torch.float64, device=order.device)
    ranks = (ranks / ranks.sum()).float().expand_as(order)
    return torch.zeros_like(ranks).scatter_(-1, order, ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Relevance:
    """Token scores and head sensitivity; the allocation multiplies them.

    Attributes:
        scores: R^tok [L, G, N] float32, Eq. (V6).
        seed_scores: S-hat [N] float32, Eq. (V3).
        sensitivity: omega [L, G] float32, mean 1, Eq. (V8).
    """

    scores: Tensor
    seed_scores: Tensor
    sensitivity: Tensor


Memory: TypeAlias = dict[Hashable, Any]
"""Notes of strategies on the layers so far, for the layers above. Each prompt has its own."""


class Scorer(PrefillReader, Strategy, abc.ABC):
    """Scores every compressible token of every (layer, KV head), a layer at a time.

    Must be deterministic, without side effects, and compute in float32 or better in any model
    dtype; scores are finite and non-negative.

    `layer` scores a layer from that layer and the notes in `memory` on those below it, so
    compression can drop entries while the prompt is still being read. A scorer whose scores of a
    layer depend on layers above it sets `compares_layers` and overrides `__call__`, which gets all
    layers; the full cache is then held until it has run.

    Attributes:
        reads_past: whether `layer` (and that of its parts) also scores the entries before a
            passage, in the same unit, if the region begins with them.
    """

    reads_past: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise `PluginError` for a scorer written for gracekv 0.2."""
        super().__init_subclass__(**options)
        own: Any = vars(cls).get("layer")
        # inspect.signature would evaluate annotations, whose names may only be imported for type
        # checking.
        count = getattr(getattr(inspect.unwrap(own), "__code__", None), "co_argcount", 4)
        before = "__call__" in vars(cls) and cls.layer is Scorer.layer
        if before or (own is not None and count != 4):
            raise PluginError(
                f"{cls.__name__} is a scorer for gracekv 0.2. Since 0.3 a scorer defines "
                f"layer(self, capture, region, memory), which returns the scores [G, N] of one "
                f"layer: read capture.keys for prefill.keys[layer], and capture.number for layer. "
                f"One that compares layers sets compares_layers = True and overrides "
                f"__call__(self, prefill, region), too."
            )

    @property
    def parts(self) -> tuple[Scorer, ...]:
        """The scorers whose scores this one combines; by default its `scorer`, if it has one.

        `part_scores` computes them; a part's `layer` alone would leave out what compares layers.
        """
        return (own,) if isinstance(own := getattr(self, "scorer", None), Scorer) else ()

    @property
    def compares_layers(self) -> bool:
        """Whether the scores of a layer depend on layers above it; by default, if a part's do."""
        return any(part.compares_layers for part in self.parts)

    def needs(self) -> Needs:
        """The needs of all parts."""
        return functools.reduce(or_, (part.needs() for part in self.parts), Needs())

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P] on the CPU: positions whose queries `layer` reads, over all layers.

        By default those of the parts, or without parts all that `needs` names. Only called if all
        layers are held, not when a prompt is read layer by layer. So `layer` must not rely on
        anything that this stores in `memory`.
        """
        if self.parts:
            return torch.cat([part.asks(prefill, region, memory) for part in self.parts])
        return torch.as_tensor(self._probes(prefill.spans, region), dtype=torch.int64)

    def _probes(self, spans: PromptSpans, region: Region) -> Sequence[int] | Tensor:
        """The P positions of a scorer without parts."""
        own = replace(self.needs(), observers=frozenset())
        recent = spans.context_end - region.end
        return () if own == Needs() else replace(own, recent=recent).known_positions(spans)

    @abc.abstractmethod
    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """The scores [G, N] of one layer, on its device.

        Args:
            capture: the layer; called for each in ascending order.
            region: the N tokens that are scored.
            memory: notes on the layers below, which this may add to.

        Raises `MissingCaptureError` if a query or an observation was not captured.
        """

    def _scores_past(self) -> bool:
        """Whether this scorer and all that it combines score the entries before a passage."""
        return self.reads_past and all(part._scores_past() for part in self.parts)

    def with_past(self, capture: LayerCapture, region: Region, memory: Memory) -> list[Tensor]:
        """The scores of `layer`, then those [G, P] of entries before a passage.

        The latter are missing if there is no passage or `layer` cannot score them.
        """
        places = capture.spans.past if self._scores_past() else 0
        if not places:
            return [part_scores(self, capture, region, memory)]
        every = part_scores(self, capture, Region(0, region.end), memory)
        return [every[:, region.start :], every[:, :places].float()]

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """The scores of all layers, float32 [L, G, N], and their mean over heads [N].

        On the device of layer 0. Raises `MissingCaptureError` like `layer`.
        """
        memory: Memory = {}
        prefill = prefill.with_observations(self.needs().observers)
        for part in self.parts:
            if part.compares_layers:
                memory["scores", part] = part(prefill, region).scores
        prefill = prefill.with_queries(self.asks(prefill, region, memory))
        each = [part_scores(self, x, region, memory).to(prefill.keys[0].device) for x in prefill]
        scores = torch.stack(each)
        return TokenScores(scores, mean_seed_scores(scores, shard=prefill.shard))


@dataclass(frozen=True)
class ProbeScorer(Scorer):
    """Scores by the attention of the prompt's last positions and of the question's.

    Attributes:
        question_probes: last question positions whose attention counts (the paper's 32).
        tail_probes: last prompt positions whose attention counts (the paper's 16).
    """

    question_probes: int = bounded(32, at_least=0, hint="The paper's is 32.")
    tail_probes: int = bounded(16, at_least=0, hint="The paper's is 16.")

    def check(self) -> None:
        """Raise `ConfigError` if there is no probe."""
        if self.question_probes + self.tail_probes < 1:
            raise ConfigError(
                f"{type(self).__name__} takes at least one probe; got question_probes=0 and "
                f"tail_probes=0."
            )

    def needs(self) -> Needs:
        """Queries of the probes."""
        return Needs(question_queries=self.question_probes, last_queries=self.tail_probes)

    def _probes(self, spans: PromptSpans, region: Region) -> Sequence[int]:
        return spans.direct_probes(self.question_probes, self.tail_probes)


def part_scores(part: Scorer, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
    """The scores [G, N] of a scorer, or of a part of one, for one layer; do not write to them.

    Raises `ShapeError` unless its `layer` returns floating-point numbers of that shape.
    """
    known: Tensor | None = memory.get(("scores", part))
    if known is None:
        # A scorer that occurs twice scores a layer once, and adds its notes once.
        run = functools.partial(part.layer, capture, region, memory)
        scores = noted(memory, ("layer", part, region), capture, run)
    else:
        scores = known[capture.number].to(capture.keys.device)
    shape, got = [capture.kv_heads, region.length], type(scores).__name__
    if isinstance(scores, Tensor):
        if scores.is_floating_point() and [*scores.shape] == shape:
            return scores.detach()
        got = f"{scores.dtype} {[*scores.shape]}"
    raise ShapeError(
        f"{type(part).__name__}.layer must return a tensor of floating-point scores [G, N] = "
        f"{shape} for layer {capture.number}; got {got}."
    )


def noted(
    memory: Memory, key: Hashable, capture: LayerCapture, compute: Callable[[], Tensor]
) -> Tensor:
    """The tensor [...] from `compute` for a layer, cached in `memory` until the next layer."""
    held: tuple[int, Tensor] | None = memory.get(key)
    if held is None or held[0] != capture.number:
        held = memory[key] = capture.number, compute()
    return held[1]


SCORERS = Registry("value", "how much each token matters to the question", Scorer)
