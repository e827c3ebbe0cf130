"""Stock cache layers of transformers, for the layers of a model that are not compressed.

While the prompt is read they run as in any cache; where one token less is wanted afterwards, since
decoding feeds the last one again, they go back by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from gracekv.prefill.kept import KeptLayer
from gracekv.prefill.model_layers import ModelLayer


class PassedOn(CacheLayerMixin):  # type: ignore[misc]
    """A compressed layer while the prompt is read: its keys and values are recorded elsewhere."""

    is_sliding = False
    is_croppable = True

    def __init__(self, seen: int) -> None:
        super().__init__()
        self._seen = seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is held of the states [1, G, q, d]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._seen += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(query_length), self._seen

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in older transformers."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self._seen += tokens_to_remove


def reading_cache(
    layers: Sequence[ModelLayer], kept: Sequence[ModelLayer], before: Sequence[KeptLayer], seen: int
) -> Cache:
    """The cache of a capture.

    Args:
        layers: all of the model.
        kept: those that are not compressed.
        before: what they hold of the `seen` tokens before; none at the start of a sequence.
        seen: tokens before.
    """
    made: list[Any] = [PassedOn(seen) for _ in layers]
    for layer in kept:
        made[layer.number] = DynamicSlidingWindowLayer(layer.window)
    for state in before:
        fill(made[state.number], state, seen)
    cache = Cache(layers=made)
    cache.activate_past_recording()
    return cache


def fill(layer: Any, state: KeptLayer, seen: int) -> None:
    """Set a stock layer to `state`, which it holds of `seen` tokens."""
    keys, values = state.tensors["keys"], state.tensors["values"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, seen


def states_of(cache: Cache, kept: Sequence[ModelLayer]) -> tuple[KeptLayer, ...]:
    """What the layers `kept` hold."""
    return tuple(
        KeptLayer(
            layer.number,
            layer.kind,
            layer.window,
            {
                "keys": cache.layers[layer.number].keys.contiguous(),
                "values": cache.layers[layer.number].values.contiguous(),
            },
        )
        for layer in kept
    )
