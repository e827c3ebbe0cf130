"""Runs the layers that are not compressed while a prompt is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gracekv.prefill.layer_state import LayerState
from gracekv.prefill.model_layers import model_layers, other_layers

# How stock cache layers call the number of tokens that they have read.
_COUNT = "cumulative_length"


class StockLayers:
    """The uncompressed layers of a model, which run over a stock cache as without a capture.

    Args:
        model: as for `capture`.
        before: what they hold already; empty at the start of a sequence.
        seen: tokens before.

    Attributes:
        states: what they hold of all tokens but the last, once everything is read; empty where all
            layers are compressed.
    """

    def __init__(self, model: Any, before: Sequence[LayerState], seen: int) -> None:
        self._layers, self._seen = other_layers(model), seen
        self._cache: Any = None
        # States cannot go back by a token.
        self._last_alone = any(layer.has_states for layer in self._layers)
        self.states: tuple[LayerState, ...] = tuple(before) if self._last_alone else ()
        if self._layers:
            from gracekv.prefill.stock_cache import reading_cache

            self._cache = reading_cache(model_layers(model), self._layers, before, seen)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        if self._cache is None:
            return {"use_cache": False}
        return {"use_cache": True, "past_key_values": self._cache}

    @contextmanager
    def beginning(self, tokens: int) -> Iterator[None]:
        """Inside, each layer reports that it has read `tokens` of this prompt.

        A model makes its masks by that before the first layer runs.
        """
        counting = [x for x in getattr(self._cache, "layers", ()) if hasattr(x, _COUNT)]
        counts = [getattr(x, _COUNT) for x in counting]
        for layer in counting:
            setattr(layer, _COUNT, self._seen + tokens)
        yield
        for layer, count in zip(counting, counts, strict=True):
            setattr(layer, _COUNT, count)

    def edges(self, start: int, stop: int, size: int) -> list[int]:
        """Edges of chunks of at most `size` tokens from `start` to `stop`."""
        end = stop - 1 if self._last_alone else stop
        return [*range(start, end, size), *([end] if self._last_alone else []), stop]

    def read(self, left: int, number: int | None = None) -> None:
        """Note that all layers, or layer `number` alone, read a chunk; `left` tokens follow.

        At the end `states` are set.
        """
        if self._cache is None:
            return
        layers = self._cache.layers
        for layer in layers if number is None else [layers[number]]:
            # Decoding feeds the last token again.
            layer.crop(-1 if left == 0 and not self._last_alone else 0)
        if left == self._last_alone:
            from gracekv.prefill.stock_cache import states_of

            own = [x for x in self._layers if number in (None, x.number)]
            numbers = {x.number for x in own}
            before = [x for x in self.states if x.number not in numbers]
            self.states = (*before, *states_of(self._cache, own))
