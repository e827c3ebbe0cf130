"""`Observer`: what a prefill captures beyond keys, values and chosen queries, as a value.

An observer is a frozen dataclass; its fields are hyperparameters, so that it is a key of
`Prefill.observed`. A driver (`gracekv.capture`, or whatever else runs a model over a prompt) shows
it the run of the tokens, and gets a tensor at the end. There are three kinds: `LayerObserver` sees
the attention of each layer, `FinalObserver` the decoder's output, and `PassObserver` lets further
tokens run over the captured keys and values once the prompt is read.

None of them knows the library that runs the model. What they may assume is written at `TokenRun`,
`FinalRun` and `Passes`; `gracekv.testing.check_observer` holds an observer to it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from gracekv.errors import renamed_in
from gracekv.kernels.rope import Rope
from gracekv.prefill.projection import Projection as Projection
from gracekv.prefill.prompt import PromptSpans, Region

Source = Literal["hidden", "outputs", "projection", "final", "passes"]
"""What a driver may give beyond queries, keys and values of each run.

- "hidden": the block's input, a row a token.
- "outputs": attention outputs before the output projection.
- "projection": the layer's output projection.
- "final": the decoder's output, and the head that makes logits of it.
- "passes": further tokens run over the captured keys and values after the prefill.
"""

Part = Literal["prefill", "surprisal", "projections", "query_sums", "reconstruction", "draft"]
"""The field of `gracekv.cache.Timings` that an observer's seconds count for."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """The attention of one layer for a run of C tokens, as a driver shows it.

    Of one layer the runs ascend, follow one another without a gap and together hold every token
    of [past, T) once; how long each is, is the driver's choice, and so is the order of the layers:
    each run may go through all layers before the next, or one layer finish before the next begins.
    Keys and values are whole up to the run's end, the rest is of the run alone. The tensors are
    lent: what is kept must be copied, since they may be overwritten when `add` returns.

    Attributes:
        start: absolute position of the first token.
        queries: [H, C, d], post-RoPE, in the model's dtype.
        keys: [G, at least start + C, d], post-RoPE; what lies after the run means nothing.
        values: [G, at least start + C, d], as `keys`.
        rope: the layer's rotations of positions 0 to at least start + C - 1.
        scale: factor of q . k before the softmax.
        softcap: c of the logits c tanh(s q.k / c); None: they are s q.k.
        sinks: [H], a logit of each query head that joins the softmax without a value; None: none.
        hidden: [C, D] the block's input; None unless read.
        outputs: [H, C, d] attention outputs before the projection; None unless read.
        projection: of the layer; None unless read.
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
    def logits(self) -> dict[str, Any]:
        """What `gracekv.kernels.logits` makes of the products of queries and keys."""
        return {"softcap": self.softcap, "sinks": self.sinks}


@dataclass(frozen=True, slots=True, eq=False)
class FinalRun:
    """The decoder's output for a run of n tokens that another token follows.

    The runs ascend, follow one another and hold every token of [past, T - 1) once. The tensors are
    lent, as those of a `TokenRun`.

    Attributes:
        start: absolute position of the first token.
        states: [n, D] after the decoder's last norm, times what multiplies the model's logits.
        following: int64 [n], the token after each, on the CPU.
        head: the torch module that makes logits of states.
        vocabulary: number of logits that count.
        softcap: c of the final logits c tanh(x / c); None: they are the head's.
    """

    start: int
    states: Tensor
    following: Tensor
    head: Any
    vocabulary: int
    softcap: float | None = None


class Accumulator(Protocol):
    """What one observer holds of one layer while the prompt is read."""

    def add(self, run: TokenRun) -> None:
        """Count a run."""

    def result(self) -> Tensor:
        """What was observed, [...]; the same for any split into runs, up to rounding.

        Called once.
        """


class FinalAccumulator(Protocol):
    """What one observer holds of the decoder's output while the prompt is read."""

    def add(self, run: FinalRun) -> None:
        """Count a run."""

    def result(self) -> Tensor:
        """What was observed, [...]; the same for any split into runs, up to rounding.

        Called once.
        """


class Continuation(Protocol):
    """Tokens that run one after another over the first keys and values of a prefill."""

    def run(self, ids: Tensor, observe: Callable[[int, TokenRun], None]) -> Tensor:
        """The decoder's output [D] for the last of `ids`, int64 [n], which follow those before.

        `observe` is called once for each layer, with its 0-based number, a run of these n tokens
        and the keys of all that they see: those of the prefill, then those of the continuation. Its
        rotations are those of the prompt's positions.
        """


class Passes(Protocol):
    """A model that runs once more over what a prefill captured.

    Attributes:
        spans: of the prompt, T tokens.
        ids: int64 [T].
        first: the most likely token after the prompt.
        stops: token ids that end an answer.
    """

    spans: PromptSpans
    ids: Tensor
    first: int
    stops: frozenset[int]

    def after(self, end: int, count: int) -> Continuation:
        """A continuation of up to `count` tokens over the keys and values before `end`.

        Raises `UnsupportedModelError` where so many pass a bound of the model.
        """

    def likeliest(self, state: Tensor) -> int:
        """The most likely token after a decoder's output [D]."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text in the middle of others; none without a tokenizer."""


@dataclass(frozen=True)
class Observer(abc.ABC):
    """What all observers have. Subclasses are frozen dataclasses.

    Attributes:
        reads: what it needs of the driver beyond queries, keys and values. A driver that cannot
            give it refuses the observer before the model runs.
        part: which stage of `Timings` its seconds count for.
    """

    reads: ClassVar[frozenset[Source]] = frozenset()
    part: ClassVar[Part] = "query_sums"

    @abc.abstractmethod
    def shape(self, prefill: Any) -> tuple[int | None, ...]:
        """The shape that the result must have; None where any length does.

        Args:
            prefill: the `Prefill` that is to hold it, for its sizes.
        """


class LayerObserver(Observer):
    """Sees the attention of each layer."""

    @abc.abstractmethod
    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator | None:
        """A new accumulator for `layer` of `layers` compressed ones; None: it is not looked at."""

    def seen(self, spans: PromptSpans) -> Region:
        """The tokens whose queries count; by default all."""
        return Region(0, spans.length)

    def combine(self, by_layer: Mapping[int, Tensor]) -> Tensor:
        """The result [L, ...], from what the layers' accumulators gave, [...] each, ascending.

        By default stacked, on the device of the first.
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
    """Lets further tokens run over the captured keys and values once the prompt is read."""

    reads: ClassVar[frozenset[Source]] = frozenset({"passes"})

    def reach(self, spans: PromptSpans) -> int:
        """How many positions its passes take at least, the prompt's own by default."""
        return spans.length

    @abc.abstractmethod
    def observe(self, passes: Passes) -> Tensor:
        """What was observed, [...]. All captured keys and values are held meanwhile."""


__getattr__ = renamed_in(__name__, {"Reading": "Source"})
