"""Stock cache layers of transformers, for the layers of a model that are not compressed.

While the prompt is read they run as in any cache; where one token less is wanted afterwards, since
decoding feeds the last one again, sliding ones go back by it. A linear layer cannot: its last token
is read alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

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


class ReadLinearLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A linear layer while the prompt is read; it keeps no past to go back to."""

    def activate_past_recording(self) -> None:
        """Nothing is recorded."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing is held that the next token does not need."""


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
        made[layer.number] = (
            ReadLinearLayer() if layer.is_linear else DynamicSlidingWindowLayer(layer.window)
        )
    for state in before:
        fill(made[state.number], state, seen)
    cache = Cache(layers=made)
    cache.activate_past_recording()
    return cache


def fill(layer: Any, state: KeptLayer, seen: int) -> None:
    """Set a stock layer to `state`, which it holds of `seen` tokens; `state` is never changed."""
    if state.window is None:
        fill_linear(layer, state.tensors["conv"], state.tensors["recurrent"])
        return
    keys, values = state.tensors["keys"], state.tensors["values"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, seen


def fill_linear(layer: Any, conv: Tensor, recurrent: Tensor) -> None:
    """Set a stock linear layer to copies of its states [S, C, k] and [S, heads, d_k, d_v]."""
    # The layer's own steps write into its tensors.
    layer.conv_states[0], layer.recurrent_states[0] = conv.clone(), recurrent.clone()
    layer.conv_kernel_size[0] = conv.shape[-1]
    layer.dtype, layer.device = conv.dtype, conv.device
    for known in (
        layer.is_conv_states_initialized,
        layer.is_recurrent_states_initialized,
        layer.has_previous_state,
    ):
        known[0] = True


def states_of(cache: Cache, kept: Sequence[ModelLayer]) -> tuple[KeptLayer, ...]:
    """What the layers `kept` hold."""
    return tuple(
        KeptLayer(
            layer.number,
            layer.kind,
            layer.window,
            _tensors(cache.layers[layer.number], layer.is_linear),
        )
        for layer in kept
    )


def _tensors(layer: Any, is_linear: bool) -> dict[str, Tensor]:
    if is_linear:
        # Further tokens change these in place.
        states = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
        return {name: x.clone() for name, x in states.items()}
    return {"keys": layer.keys.contiguous(), "values": layer.values.contiguous()}
