"""`Observations`: the observers of one prefill, fed by a driver; and `Clock`, which times them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gracekv.errors import ObserverError
from gracekv.prefill.needs import Needs
from gracekv.prefill.observer import (
    Accumulator,
    FinalObserver,
    FinalRun,
    LayerObserver,
    Observer,
    Passes,
    PassObserver,
    Source,
    TokenRun,
)
from gracekv.prefill.spans import PromptSpans
from gracekv.undo import full_float32


def check_observers(
    observers: Iterable[Observer], gives: frozenset[Source], driver: str, advice: str
) -> None:
    """Raise `ObserverError` if an observer reads data that the driver cannot provide.

    Args:
        observers: the requested observers.
        gives: the data that the driver provides in addition to queries, keys and values.
        driver: its name, used as the subject of a sentence.
        advice: a sentence that says how to fix it.
    """
    for observer in sorted(observers, key=repr):
        if missing := sorted(observer.reads - gives):
            raise ObserverError(
                f"{observer!r} reads {', '.join(missing)}, but {driver} provides "
                f"{', '.join(sorted(gives)) or 'none of it'} "
                f"(see gracekv.prefill.observer.Source). {advice}"
            )


class Observations:
    """The accumulators of one prefill.

    Args:
        observers: the observers.
        layers: L, compressed layers.
        spans: spans of the prompt.

    Attributes:
        spans: as given.
    """

    def __init__(self, observers: Iterable[Observer], layers: int, spans: PromptSpans) -> None:
        # If heads are sharded, all processes must use the same order.
        self._observers, self.spans = sorted(observers, key=repr), spans
        self._by_layer: list[dict[LayerObserver, Accumulator]] = [{} for _ in range(layers)]
        for observer in self._observers:
            if isinstance(observer, LayerObserver):
                for layer, held in enumerate(self._by_layer):
                    if (accumulator := observer.accumulator(layer, layers, spans)) is not None:
                        held[observer] = accumulator
        final = [x for x in self._observers if isinstance(x, FinalObserver)]
        self._final = {x: x.accumulator(spans) for x in final}
        self._time = Clock[Observer]()

    def reads(self, what: Source, layer: int | None = None) -> bool:
        """Whether an observer, of `layer` if that is given, reads `what`."""
        asked: Sequence[Observer] = self._observers if layer is None else [*self._by_layer[layer]]
        return any(what in observer.reads for observer in asked)

    def add(self, layer: int, run: Callable[[], TokenRun]) -> None:
        """Show a run of `layer` (0-based), made by `run` only if an observer looks at the layer."""
        if not self._by_layer[layer]:
            return
        tokens = run()
        for observer, accumulator in self._by_layer[layer].items():
            with self._stage(observer, tokens.queries.device):
                accumulator.add(tokens)

    def add_final(self, run: FinalRun) -> None:
        """Show a run of the decoder's output."""
        for observer, accumulator in self._final.items():
            with self._stage(observer, run.states.device):
                accumulator.add(run)

    @property
    def seconds(self) -> dict[Observer, float]:
        """The seconds of each observer so far. Synchronises with a GPU."""
        return dict.fromkeys((x.timed_as for x in self._observers), 0.0) | self._time.seconds()

    def layer_results(self, layer: int, device: torch.device) -> dict[Observer, Tensor]:
        """The result of each observer for `layer`, [...]; called once per layer."""
        held, self._by_layer[layer] = self._by_layer[layer], {}
        results: dict[Observer, Tensor] = {}
        for observer, accumulator in held.items():
            with self._stage(observer, device):
                results[observer] = accumulator.result()
        return results

    def results(self, device: torch.device, passes: Passes | None) -> dict[Observer, Tensor]:
        """The result of each observer, [...]; `Prefill` checks shapes and values.

        Args:
            device: the device to wait for.
            passes: runs further tokens; None if no observer needs it.
        """
        results: dict[Observer, Tensor] = {}
        for observer in self._observers:
            if observer in results:
                continue
            with self._stage(observer, device):
                if isinstance(observer, LayerObserver):
                    layers = enumerate(self._by_layer)
                    parts = {i: x.pop(observer).result() for i, x in layers if observer in x}
                    results[observer] = observer.combine(parts)
                elif isinstance(observer, FinalObserver):
                    results[observer] = self._final.pop(observer).result()
                elif isinstance(observer, PassObserver) and passes is not None:
                    alike = [x for x in self._observers if x.timed_as == observer.timed_as]
                    results.update(zip(alike, observer.observe_all(passes, alike), strict=True))
        return results

    @contextmanager
    def _stage(self, observer: Observer, device: torch.device) -> Iterator[None]:
        """Time the block, and compute in full float32."""
        # Further passes of the model need autocast.
        full = nullcontext() if isinstance(observer, PassObserver) else full_float32()
        with self._time.time(observer.timed_as, device), full:
            yield


def seconds_by_stage(seconds: Mapping[str | Observer, float], needs: Needs) -> dict[str, float]:
    """Seconds of the forward pass and of the observers in `needs`, by stage of `Timings`.

    A capture for several pipelines has more observers; each pipeline counts only its own.
    """
    by_stage = {"prefill": seconds["prefill"]} if "prefill" in seconds else {}
    for observer in {x.timed_as for x in needs.observers}:
        if observer in seconds:
            by_stage[observer.part] = by_stage.get(observer.part, 0.0) + seconds[observer]
    return by_stage


Name = TypeVar("Name", bound=Hashable)


class Clock(Generic[Name]):
    """Adds up the seconds of timed blocks by name.

    On a CPU a block takes wall seconds. On a GPU the time between two CUDA events on the current
    stream is used; it is only read when `seconds` is called, so timing a block costs two launches
    and no wait.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[Name, float](float)
        self._events: list[tuple[Name, torch.device, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: Name, device: torch.device) -> Iterator[None]:
        """Add the seconds that the block takes on `device` to those of `name`."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
            yield
            last.record(stream)
            self._events.append((name, device, first, last))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def seconds(self) -> dict[Name, float]:
        """The seconds of each name so far. Waits for the last timed block of each GPU."""
        # Not for the whole GPU, which CUDA forbids while another thread records a graph.
        for last in {device: last for _, device, _, last in self._events}.values():
            last.synchronize()
        for name, _, first, last in self._events:
            self._seconds[name] += first.elapsed_time(last) / 1000
        self._events.clear()
        return dict(self._seconds)
