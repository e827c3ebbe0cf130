"""Stock cache layers, used next to compressed ones, that resume from their state after prefill."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor
from transformers import cache_utils

from gracekv.errors import CacheError
from gracekv.hf.layer import GraceLayer, check_alike
from gracekv.hf.packed_layer import repeats
from gracekv.prefill.layer_state import WITHOUT_CACHE, LayerState
from gracekv.prefill.stock_cache import WithoutCache, fill, fill_states, read_states


class ResumedSlidingLayer(cache_utils.DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer that resumes from its state after the prompt, which never changes.

    Args:
        state: its state, of S prompts.
        length: tokens that the prompts cover.
    """

    def __init__(self, state: LayerState, length: int) -> None:
        super().__init__(state.window)
        self._state, self._length = state, length
        self.reset()

    def reset(self) -> None:
        """Forget what came after the prompt."""
        fill(self, self._state, self._length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in the stock layer, for states [B, G, q, d]; repeats rows for samples and beams.

        Raises `CacheError` if the rows, their dtype or their device do not fit.
        """
        check_alike(self.values, value_states)
        self.batch_repeat_interleave(repeats(len(self.keys), len(key_states)))
        # Detached, as in compressed layers, so that copies can be made.
        keys, values = super().update(key_states.detach(), value_states.detach(), *args, **kwargs)
        # While tokens are recorded, transformers before 5.23 returns more than the mask covers.
        seen = self.sliding_window - 1 + key_states.shape[2]
        return keys[:, :, -seen:], values[:, :, -seen:]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1:
            super().batch_repeat_interleave(repeats)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `CacheError` if `crop` would fail: a full window can drop recorded tokens only."""
        is_full = self.cumulative_length >= self.sliding_window
        # The last crop leaves what the next step reads.
        left = self.keys.shape[2] + tokens_to_remove if self.record_past else 0
        needed = min(self.cumulative_length + tokens_to_remove, self.sliding_window - 1)
        if tokens_to_remove and is_full and left < needed:
            raise CacheError(_cannot_go_back(self._state))

    def crop(self, tokens_to_remove: int) -> None:
        """As in the stock layer, but removing nothing needs no recorded tokens."""
        if tokens_to_remove or self.record_past:
            super().crop(tokens_to_remove)

    def state(self) -> Any:
        """The state, for `set_state`; its tensors are replaced, never changed."""
        return self.keys, self.values, self.cumulative_length

    def set_state(self, state: Any) -> None:
        """Go back to what `state` returned."""
        self.keys, self.values, self.cumulative_length = state


class ResumedStates(cache_utils.LinearAttentionLayer):  # type: ignore[misc]
    """A layer that resumes from copies of its states after the prompt.

    Args:
        state: its states, of S prompts.
    """

    def __init__(self, state: LayerState) -> None:
        super().__init__()
        self._state = state
        self.reset()

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed: only the inputs of a convolution can be recorded."""
        return "recurrent" not in self._state.tensors

    def reset(self) -> None:
        """Forget what came after the prompt."""
        fill_states(self, self._state.tensors)

    def fit(self, rows: int) -> None:
        """Repeat the states for samples and beams; raises `CacheError` if `rows` do not fit."""
        # Every step asks, so nothing is copied.
        states = self.recurrent_states[0] if self.conv_states[0] is None else self.conv_states[0]
        ResumedStates.batch_repeat_interleave(self, repeats(len(states), rows))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises `CacheError` if tokens are to be removed that were not recorded."""
        self.check_crop(tokens_to_remove)
        if self.record_past:
            super().crop(tokens_to_remove)
            # Copies, which steps may also write to outside of inference mode.
            self.set_state(self.state())

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `CacheError` if `crop` would fail."""
        states, size = self.conv_states[0], self.conv_kernel_size[0]
        recorded = self.record_past and states.shape[-1] + tokens_to_remove >= size
        if tokens_to_remove and not recorded:
            raise CacheError(_cannot_go_back(self._state))

    def activate_past_recording(self) -> None:
        """Record inputs of convolutions; recurrent states cannot, and keep plain single steps."""
        self.record_past = self.is_croppable

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1:
            states = self.state().items()
            self.set_state({name: x.repeat_interleave(repeats, dim=0) for name, x in states})

    def batch_select_indices(self, indices: Tensor) -> None:
        self.set_state({name: x[indices.to(x.device)] for name, x in self.state().items()})

    def state(self) -> Any:
        """Copies of the states, for `set_state`, since steps change them in place."""
        return read_states(self)

    def set_state(self, state: Any) -> None:
        """Go back to what `state` returned."""
        fill_states(self, state)


class HybridLayer(ResumedStates, cache_utils.LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """States together with compressed keys and values, which `attention` holds.

    Args:
        state: the states, of S prompts.
        attention: the compressed part.
    """

    # Delegated to the compressed part.
    update = property(attrgetter("attention.update"))
    get_seq_length = property(attrgetter("attention.get_seq_length"))
    get_mask_sizes = property(attrgetter("attention.get_mask_sizes"))
    get_max_length = property(attrgetter("attention.get_max_length"))

    def __init__(self, state: LayerState, attention: GraceLayer) -> None:
        self.attention = attention
        super().__init__(state)

    def reset(self) -> None:
        super().reset()
        self.attention.reset()

    def crop(self, tokens_to_remove: int) -> None:
        ResumedStates.crop(self, tokens_to_remove)
        self.attention.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.attention.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.attention.batch_select_indices(indices)

    reorder_cache = batch_select_indices


def resumed_layer(state: LayerState, length: int, attention: GraceLayer | None) -> Any:
    """The layer that resumes from `state` after `length` tokens; a hybrid also has `attention`."""
    if state.window is not None:
        return ResumedSlidingLayer(state, length)
    if state.kind in WITHOUT_CACHE:
        return WithoutCache()
    return ResumedStates(state) if attention is None else HybridLayer(state, attention)


def is_resumed(layer: Any) -> bool:
    """Whether `layer` has its own state to restore."""
    return isinstance(layer, ResumedStates | ResumedSlidingLayer)


def _cannot_go_back(state: LayerState) -> str:
    return (
        f"Layer {state.number} is of kind {state.kind}: it cannot remove tokens that it did not "
        f"record. Begin again with result.new_cache()."
    )
