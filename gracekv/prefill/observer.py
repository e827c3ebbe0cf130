"""`Observer`: captures more from a prefill than keys, values and chosen queries.

An observer is a frozen dataclass whose fields are hyperparameters; it is a key of
`Prefill.observed`. A driver (`gracekv.capture`, or anything else that runs a model over a prompt)
shows it the tokens run by run and gets a tensor at the end. There are three kinds: `LayerObserver`
sees the attention of each layer, `FinalObserver` sees the decoder's output, and `PassObserver` runs
further tokens over the captured keys and values after the prompt is read.

Observers do not depend on the library that runs the model. `TokenRun`, `FinalRun` and `Passes`
document what they may assume; `gracekv.testing.check_observer` checks that an observer assumes no
more.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gracekv.errors import renamed_in
from gracekv.kernels.rope import Rope
from gracekv.prefill.projection import Projection as Projection
from gracekv.prefill.spans import PromptSpans, Region

Source = Literal["hidden", "outputs", "projection", "final", "passes"]
"""Data that a driver may provide in addition to queries, keys and values of each run.

- "hidden": the block's input, one row per token.
- "outputs": attention outputs before the output projection.
- "projection": the layer's output projection.
- "final": the decoder's output, and the head that computes logits from it.
- "passes": further tokens run over the captured keys and values after the prefill.
"""

Part = Literal["prefill", "surprisal", "projections", "query_sums", "reconstruction", "draft"]
"""The field of `gracekv.cache.Timings` that an observer's seconds are added to."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """The attention of one layer for a run of C tokens, provided by a driver.

    The runs of a layer ascend without gaps and together cover every token of [past, T) once. The
    driver chooses their lengths and the order of layers: each run may go through all layers before
    the next run, or one layer may finish before the next layer begins. If the tokens follow packed
    entries (`spans.past` > 0, in `extend` and chats), queries, keys and values have 8 more
    coordinates than d, which add an entry's log multiplicity to its logits. Keys and values cover
    all tokens up to the end of the run; the other tensors cover the run. Tensors are borrowed: copy
    what you keep, since they may be overwritten after `add` returns.

    Attributes:
        start: absolute position of the first token.
        queries: [H, C, d], post-RoPE, in the model's dtype.
        keys: [G, at least start + C, d], post-RoPE; rows after the run are undefined.
        values: [G, at least start + C, d], like `keys`.
        rope: the layer's rotations of positions 0 to at least start + C - 1.
        scale: factor of q . k before the softmax.
        softcap: c of the logits c tanh(s q.k / c), or None.
        sinks: [H], sink logits, which join the softmax without a value, or None.
        hidden: [C, D], the block's input; None unless it is read.
        outputs: [H, C, d], attention outputs before the projection; None unless they are read.
        projection: the layer's output projection; None unless it is read.
    """

    start: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    rope: Rope
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    hidden: Tensor | None = None
    outputs: Tensor | None = None
    projection: Projection | None = None

    @property
    def end(self) -> int:
        """start + C."""
        return self.start + self.queries.shape[1]

    @property
    def softmax_args(self) -> dict[str, Any]:
        """`scale`, `softcap` and `sinks`, arguments of functions that compute attention."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    @property
    def logits(self) -> dict[str, Any]:
        """`softmax_args` without the scale, as in 0.2."""
        return {"softcap": self.softcap, "sinks": self.sinks}


@dataclass(frozen=True, slots=True, eq=False)
class FinalRun:
    """The decoder's output for a run of n tokens, each of which has a next token.

    The runs ascend without gaps and cover every token of [past, T - 1) once. Tensors are borrowed,
    as in `TokenRun`.

    Attributes:
        start: absolute position of the first token.
        states: [n, D] after the decoder's last norm, times the model's logit factor.
        following: int64 [n], the next token of each, on the CPU.
        head: the torch module that computes logits from states.
        vocabulary: number of logits that count.
        softcap: c of the final logits c tanh(x / c), or None.
    """

    start: int
    states: Tensor
    following: Tensor
    head: Any
    vocabulary: int
    softcap: float | None = None


Run = TypeVar("Run", contravariant=True)


class RunAccumulator(Protocol[Run]):
    """The state of one observer while the prompt is read."""

    def add(self, run: Run) -> None:
        """Count a run."""

    def result(self) -> Tensor:
        """The observation, [...]; the same for any split into runs, up to rounding.

        Called once.
        """


Accumulator: TypeAlias = RunAccumulator[TokenRun]
"""The state of one observer for one layer."""

FinalAccumulator: TypeAlias = RunAccumulator[FinalRun]
"""The state of one observer of the decoder's output."""


class Continuation(Protocol):
    """A sequence of tokens that continues a prefix of a prefill's keys and values."""

    def run(self, ids: Tensor, observe: Callable[[int, TokenRun], None]) -> Tensor:
        """The decoder's output [D] for the last of `ids`, int64 [n], which follow earlier runs.

        `observe` is called once for each layer, with its 0-based number and a run of the n tokens.
        Its keys are those of the prefill, then those of the continuation; its rotations are those
        of the prompt's positions.
        """


class Passes(Protocol):
    """A model that runs again over a captured prefill.

    Attributes:
        spans: spans of the prompt, T tokens.
        ids: int64 [T].
        tail: int64 [n], the template's change of turn, which follows context and question.
        first: the most likely token after the prompt.
        stops: token ids that end an answer.
    """

    spans: PromptSpans
    ids: Tensor
    tail: Tensor
    first: int
    stops: frozenset[int]

    def after(self, end: int, count: int) -> Continuation:
        """A continuation of up to `count` tokens over the keys and values before `end`.

        Raises `UnsupportedModelError` if they exceed a limit of the model.
        """

    def likeliest(self, state: Tensor) -> int:
        """The most likely token after a decoder's output [D]."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text inside other text; empty without a tokenizer."""


class TokenColumns:
    """An `Accumulator` of numbers [n, T], which subclasses fill run by run.

    Args:
        spans: spans of the prompt, T tokens.
    """

    def __init__(self, spans: PromptSpans) -> None:
        self.spans, self._columns = spans, torch.empty(0, dtype=torch.float32)

    def columns(self, rows: Tensor) -> Tensor:
        """The numbers so far, float32 [n, T]; initially zeros, for n `rows`, on their device."""
        if not self._columns.numel():
            shape = (len(rows), self.spans.length)
            self._columns = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        return self._columns

    def result(self) -> Tensor:
        """The numbers [n, T]."""
        return self._columns


@dataclass(frozen=True)
class Observer(abc.ABC):
    """Base class of observers. Subclasses are frozen dataclasses.

    Attributes:
        reads: data that it needs from the driver in addition to queries, keys and values. A driver
            that cannot provide them rejects the observer before the model runs.
        part: the field of `Timings` that its seconds are added to.
    """

    reads: ClassVar[frozenset[Source]] = frozenset()
    part: ClassVar[Part] = "query_sums"

    @property
    def timed_as(self) -> Observer:
        """The observer that its time is charged to: itself, or the one of a shared pass."""
        return self

    @abc.abstractmethod
    def shape(self, prefill: Any) -> tuple[int | None, ...]:
        """The shape of the result; None for dimensions of any length.

        Args:
            prefill: the `Prefill` or `CaptureInfo` that gives the sizes.
        """


class LayerObserver(Observer):
    """Sees the attention of each layer."""

    @abc.abstractmethod
    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator | None:
        """A new accumulator for `layer` of `layers` compressed ones, or None to skip the layer."""

    def seen(self, spans: PromptSpans) -> Region:
        """The tokens whose queries count; by default all."""
        return Region(0, spans.length)

    def combine(self, by_layer: Mapping[int, Tensor]) -> Tensor:
        """The result [L, ...] from the results of all layers, [...] each, ascending.

        By default they are stacked on the device of the first.
        """
        tensors = list(by_layer.values())
        return torch.stack([x.to(tensors[0].device) for x in tensors])


class FinalObserver(Observer):
    """Sees the decoder's output."""

    reads: ClassVar[frozenset[Source]] = frozenset({"final"})

    @abc.abstractmethod
    def accumulator(self, spans: PromptSpans) -> FinalAccumulator:
        """A new accumulator."""


class PassObserver(Observer):
    """Runs further tokens over the captured keys and values after the prompt is read."""

    reads: ClassVar[frozenset[Source]] = frozenset({"passes"})

    def reach(self, spans: PromptSpans) -> int:
        """Lower bound on the number of positions of its passes; by default the prompt's length."""
        return spans.length

    @abc.abstractmethod
    def observe(self, passes: Passes) -> Tensor:
        """The observation, [...]. All captured keys and values are held until it returns."""

    def observe_all(self, passes: Passes, alike: Sequence[Any]) -> list[Tensor]:
        """The observations, [...] each, of all observers that share its pass (`timed_as`)."""
        return [observer.observe(passes) for observer in alike]


__getattr__ = renamed_in(__name__, {"Reading": "Source"})
