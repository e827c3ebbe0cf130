"""Stock transformers cache layers for the layers that are not compressed.

They run as in any cache while the prompt is read. Decoding feeds the last token again, so sliding
layers are then cropped by one token. States cannot be cropped, so with them the last token is read
by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from gracekv.prefill.cache_keyword import cache_keyword
from gracekv.prefill.layer_state import LayerState
from gracekv.prefill.model_layers import model_layers, other_layers


class PassedOn(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """A compressed layer while the prompt is read: its keys and values are recorded elsewhere."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.cumulative_length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the states [1, G, q, d] are not held."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(query_length), self.cumulative_length

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length += tokens_to_remove


class ReadStates(cache_utils.LinearAttentionLayer):  # type: ignore[misc]
    """A layer with states while the prompt is read; it keeps no earlier states."""

    def activate_past_recording(self) -> None:
        """Do nothing."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: it holds only what the next token needs."""


class WithoutCache(ReadStates):
    """A layer that holds nothing; to transformers (also before 5.23), a layer with states."""

    is_croppable = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Do nothing."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing for `indices`, int64 [B]."""


class ReadHybrid(PassedOn, ReadStates, cache_utils.LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with states and compressed keys and values, while the prompt is read."""

    def __init__(self, length: int) -> None:
        cache_utils.LinearAttentionAndFullAttentionLayer.__init__(self)
        self.cumulative_length = length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise the states as in any cache."""
        cache_utils.LinearAttentionAndFullAttentionLayer.lazy_initialization(self, *args, **kwargs)


def fill(layer: Any, state: LayerState, length: int) -> None:
    """Set a stock layer to `state`, which it holds of `length` tokens; `state` is never changed."""
    if state.window is not None:
        keys, values = state.tensors["keys"], state.tensors["values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, length
    elif state.tensors:
        fill_states(layer, state.tensors)


@torch.inference_mode(False)
def fill_states(layer: Any, states: Mapping[str, Tensor]) -> None:
    """Set a stock layer to copies of `states` [S, ...], named as in `LayerState`."""
    # The layer's own steps write to its tensors, both inside and outside inference mode.
    conv, recurrent = (states[x].clone() if x in states else None for x in ("conv", "recurrent"))
    layer.conv_states[0], layer.is_conv_states_initialized[0] = conv, conv is not None
    layer.recurrent_states[0] = recurrent
    layer.is_recurrent_states_initialized[0] = recurrent is not None
    if conv is not None and layer.conv_kernel_size[0] is None:
        layer.conv_kernel_size[0] = conv.shape[-1]
    first = next(iter(states.values()))
    layer.dtype, layer.device, layer.has_previous_state[0] = first.dtype, first.device, True


def read_states(layer: Any) -> dict[str, Tensor]:
    """Copies of a stock layer's states [S, ...], since further tokens change them in place."""
    states = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    return {name: x.clone() for name, x in states.items() if x is not None}


class StockLayers:
    """The uncompressed layers of a model, which run over a stock cache as usual.

    Args:
        model: as for `capture`.
        states: their earlier states; empty at the start of a sequence.
        length: number of earlier tokens.

    Attributes:
        states: their states after all tokens but the last, set when everything is read; empty if
            all layers are compressed.
    """

    def __init__(self, model: Any, states: Sequence[LayerState], length: int) -> None:
        self._layers, self._seen = other_layers(model), length
        self._keyword = cache_keyword(model.forward)
        self._cache: Any = None
        # States cannot be cropped by a token.
        self._last_alone = any(layer.has_states for layer in self._layers)
        self.states: tuple[LayerState, ...] = tuple(states) if self._last_alone else ()
        if not self._layers:
            return
        layers: list[Any] = [PassedOn(length) for _ in model_layers(model)]
        for layer in self._layers:
            layer_cache: Any = WithoutCache()
            if layer.window is not None:
                layer_cache = cache_utils.DynamicSlidingWindowLayer(layer.window)
            elif layer.has_states:
                layer_cache = ReadHybrid(length) if layer.has_attention else ReadStates()
            layers[layer.number] = layer_cache
        for state in states:
            fill(layers[state.number], state, length)
        self._cache = cache_utils.Cache(layers=layers)
        self._cache.activate_past_recording()

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        if self._cache is None:
            return {"use_cache": False}
        return {"use_cache": True, self._keyword: self._cache}

    @contextmanager
    def beginning(self, tokens: int) -> Iterator[None]:
        """Inside the `with` block, each layer reports `tokens` of this prompt as read.

        A model makes its masks from this number before the first layer runs.
        """
        layers = getattr(self._cache, "layers", ())
        counts = [(x, x.cumulative_length) for x in layers if hasattr(x, "cumulative_length")]
        for layer, _ in counts:
            layer.cumulative_length = self._seen + tokens
        yield
        for layer, count in counts:
            layer.cumulative_length = count

    def edges(self, start: int, stop: int, size: int) -> list[int]:
        """Borders of chunks of at most `size` tokens from `start` to `stop`."""
        ends = [stop - 1, stop] if self._last_alone else [stop]
        return [*range(start, ends[0], size), *ends]

    def read(self, remaining: int, number: int | None = None) -> None:
        """Record that all layers, or only layer `number`, read a chunk; `remaining` tokens follow.

        Sets `states` at the end.
        """
        if self._cache is None:
            return
        layers = self._cache.layers
        for layer in layers if number is None else [layers[number]]:
            # Decoding feeds the last token again.
            layer.crop(-1 if remaining == 0 and not self._last_alone else 0)
        if remaining != self._last_alone:
            return
        states = [x for x in self.states if number not in (None, x.number)]
        for layer in (x for x in self._layers if number in (None, x.number)):
            cache, tensors = layers[layer.number], dict[str, Tensor]()
            if layer.window is not None:
                # Copies, since views would keep everything that was read.
                tensors = {"keys": cache.keys.clone(), "values": cache.values.clone()}
                cache.keys, cache.values = tensors.values()
            elif layer.has_states:
                tensors = read_states(cache)
            states.append(LayerState(layer.number, layer.kind, layer.window, tensors))
        self.states = tuple(states)
