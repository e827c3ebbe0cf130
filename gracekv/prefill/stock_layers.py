"""What a model holds beside compressed entries, while its prompt is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gracekv.prefill.kept import KeptLayer
from gracekv.prefill.model_layers import kept_layers, model_layers


class StockLayers:
    """They run over a cache of transformers, as they would without a capture.

    Args:
        model: as for `capture`.
        before: what they hold already; empty at the start of a sequence.
        seen: tokens before.

    Attributes:
        states: what they hold of all tokens but the last, once everything is read; empty where all
            layers are compressed.
    """

    def __init__(self, model: Any, before: Sequence[KeptLayer], seen: int) -> None:
        self._kept = kept_layers(model)
        self._cache: Any = None
        # States cannot go back by a token.
        self._last_alone = any(layer.has_states for layer in self._kept)
        self.states: tuple[KeptLayer, ...] = tuple(before) if self._last_alone else ()
        if self._kept:
            from gracekv.prefill.stock_cache import reading_cache

            self._cache = reading_cache(model_layers(model), self._kept, before, seen)

    def options(self) -> dict[str, Any]:
        """What the model's forward is given."""
        if self._cache is None:
            return {"use_cache": False}
        return {"use_cache": True, "past_key_values": self._cache}

    def edges(self, start: int, stop: int, size: int) -> list[int]:
        """Where chunks of at most `size` of the tokens from `start` to `stop` begin and end."""
        end = stop - 1 if self._last_alone else stop
        return [*range(start, end, size), *([end] if self._last_alone else []), stop]

    def read(self, left: int) -> None:
        """One chunk has been read, `left` tokens follow; at the end `states` are set."""
        if self._cache is None:
            return
        # Decoding feeds the last token again.
        self._cache.crop(-1 if left == 0 and not self._last_alone else 0)
        if left == self._last_alone:
            from gracekv.prefill.stock_cache import states_of

            self.states = states_of(self._cache, self._kept)
