"""The observers of one prefill, as its driver feeds them, and whether what was captured fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import NonFiniteError, ObserverError, ShapeError
from gracekv.kernels.linalg import full_float32
from gracekv.prefill.observer import (
    Accumulator,
    FinalObserver,
    FinalRun,
    LayerObserver,
    Observer,
    Passes,
    PassObserver,
    Reading,
    TokenRun,
)
from gracekv.prefill.prompt import PromptSpans


def check_observers(
    observers: Iterable[Observer], gives: frozenset[Reading], driver: str, advice: str
) -> None:
    """Raise `ObserverError` if an observer reads what a driver cannot give.

    Args:
        observers: what is asked for.
        gives: what the driver gives beyond queries, keys and values.
        driver: it, in words, as the subject of a sentence.
        advice: what to do instead, a sentence.
    """
    for observer in sorted(observers, key=repr):
        missing = sorted(observer.reads - gives)
        if missing:
            raise ObserverError(
                f"{observer!r} reads {_words(missing)}, and {driver} gives "
                f"{_words(sorted(gives)) or 'none of it'}. {advice}"
            )


class Observations:
    """The accumulators of one prefill.

    Args:
        observers: what is captured.
        layers: L, compressed layers.
        spans: of the prompt.

    Attributes:
        seconds: what each observer took; complete after `results`.
    """

    def __init__(self, observers: Iterable[Observer], layers: int, spans: PromptSpans) -> None:
        # Where heads are spread over processes, all must go through them in one order.
        self._observers = sorted(observers, key=repr)
        self._by_layer: list[dict[LayerObserver, Accumulator]] = [{} for _ in range(layers)]
        for observer in self._observers:
            if isinstance(observer, LayerObserver):
                for layer, held in enumerate(self._by_layer):
                    accumulator = observer.accumulator(layer, layers, spans)
                    if accumulator is not None:
                        held[observer] = accumulator
        self._final = {
            x: x.accumulator(spans) for x in self._observers if isinstance(x, FinalObserver)
        }
        self.seconds: dict[Observer, float] = dict.fromkeys(self._observers, 0.0)
        self._events: list[tuple[Observer, torch.cuda.Event, torch.cuda.Event]] = []

    def reads(self, what: Reading, layer: int | None = None) -> bool:
        """Whether some observer reads it; of `layer`, if that is given."""
        asked: Sequence[Observer] = self._observers if layer is None else [*self._by_layer[layer]]
        return any(what in observer.reads for observer in asked)

    def add(self, layer: int, run: Callable[[], TokenRun]) -> None:
        """Show a run of `layer`, 0-based, which `run` makes if an observer looks at the layer."""
        if not self._by_layer[layer]:
            return
        made = run()
        for observer, accumulator in self._by_layer[layer].items():
            with self._clock(observer, made.queries.device), full_float32():
                accumulator.add(made)

    def add_final(self, run: FinalRun) -> None:
        """Show a run of the decoder's output."""
        for observer, accumulator in self._final.items():
            with self._clock(observer, run.states.device):
                accumulator.add(run)

    @property
    def running_seconds(self) -> float:
        """What the layers' observers took so far, which lies inside the model's own run."""
        self._read_events()
        return sum(self.seconds[x] for x in self._observers if isinstance(x, LayerObserver))

    def results(self, device: torch.device, passes: Passes | None) -> dict[Observer, Tensor]:
        """What each observed, [...]; `Prefill` checks shapes and numbers.

        Args:
            device: to wait for.
            passes: runs further tokens; None where no observer asks for it.
        """
        found: dict[Observer, Tensor] = {}
        for observer in self._observers:
            with self._clock(observer, device):
                if isinstance(observer, LayerObserver):
                    held = [(i, x) for i, x in enumerate(self._by_layer) if observer in x]
                    found[observer] = observer.combine(
                        {i: x.pop(observer).result() for i, x in held}
                    )
                elif isinstance(observer, FinalObserver):
                    found[observer] = self._final.pop(observer).result()
                elif isinstance(observer, PassObserver) and passes is not None:
                    found[observer] = observer.observe(passes)
        self._read_events()
        return found

    @contextmanager
    def _clock(self, observer: Observer, device: torch.device) -> Iterator[None]:
        """Time the block without making a GPU wait."""
        if device.type != "cuda":
            started = time.perf_counter()
            yield
            self.seconds[observer] += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((observer, first, last))

    def _read_events(self) -> None:
        for observer, first, last in self._events:
            last.synchronize()
            self.seconds[observer] += first.elapsed_time(last) / 1000
        self._events.clear()


def _words(readings: Sequence[str]) -> str:
    names = {
        "hidden": "hidden states",
        "outputs": "attention outputs",
        "projection": "output projections",
        "final": "the decoder's output",
        "passes": "further passes over the captured keys and values",
    }
    return ", ".join(names[x] for x in readings)


# Tokens that are summed at once.
_TOKENS = 1024


def check_tensors(prefill: Any) -> None:
    """Raise `ShapeError` if they do not, and `NonFiniteError` if one holds NaN or infinity."""
    if not len(prefill.keys) == len(prefill.values) == len(prefill.queries) > 0:
        raise ShapeError(
            f"Prefill takes keys, values and queries of the same L > 0 layers; got "
            f"{len(prefill.keys)}, {len(prefill.values)} and {len(prefill.queries)}."
        )
    heads, dim = prefill.keys[0].shape[0], prefill.keys[0].shape[-1]
    kv_shape = (heads, prefill.spans.length, dim)
    for layer, (k, v, q) in enumerate(
        zip(prefill.keys, prefill.values, prefill.queries, strict=True)
    ):
        if tuple(k.shape) != kv_shape or tuple(v.shape) != kv_shape:
            raise ShapeError(
                f"Keys and values of every layer must be [G, T, d] = {list(kv_shape)} for one "
                f"sequence; layer {layer} has {list(k.shape)} and {list(v.shape)}. Compress "
                f"the sequences of a batch one by one, without padding."
            )
        asked = (len(prefill.query_positions), dim)
        if q.ndim != 3 or q.shape[0] % heads or tuple(q.shape[1:]) != asked:
            raise ShapeError(
                f"Queries must be [H, {len(prefill.query_positions)}, {dim}] with H a multiple of "
                f"G = {heads}; layer {layer} has {list(q.shape)}."
            )
        for name, tensor in (("keys", k), ("values", v), ("queries", q)):
            if not is_finite(tensor):
                raise NonFiniteError(
                    f"The {name} of layer {layer} hold NaN or infinity. Check the model's "
                    f"weights and dtype (float16 overflows in some models: try bfloat16)."
                )
    if prefill.rope.cos.shape[0] < prefill.spans.length:
        raise ShapeError(
            f"The RoPE table covers {prefill.rope.cos.shape[0]} positions, the prompt has "
            f"{prefill.spans.length}."
        )
    for observer, tensor in prefill.observed.items():
        _check_observation(prefill, observer, tensor)


def _check_observation(prefill: Any, observer: Observer, tensor: Tensor) -> None:
    wanted, got = observer.shape(prefill), list(tensor.shape)
    if len(wanted) != len(got) or any(
        size not in (None, other) for size, other in zip(wanted, got, strict=True)
    ):
        shown = ", ".join("*" if size is None else str(size) for size in wanted)
        raise ShapeError(f"{observer!r} must observe a tensor [{shown}] here; it gave {got}.")
    if not is_finite(tensor):
        raise NonFiniteError(
            f"What {observer!r} observed holds NaN or infinity. Check the model's weights and "
            f"dtype, or the observer."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all of `tensor` [...] is finite, without a copy of its size."""
    # A NaN or an infinity survives a sum; float64, since long float16 sums overflow. In parts,
    # since torch copies what it sums in another dtype.
    axis = max(range(tensor.ndim), key=lambda i: tensor.shape[i])
    sums = [part.sum(dtype=torch.float64) for part in tensor.split(_TOKENS, dim=axis)]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())
