"""Layers of `GraceCache` that are not compressed: transformers' own, begun after the prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from gracekv.errors import CacheError
from gracekv.hf.row_repeats import repeats
from gracekv.prefill.kept import KeptLayer
from gracekv.prefill.stock_cache import fill, fill_linear


class KeptSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer that goes on from its state after the prompt, which is never changed.

    Args:
        kept: its state, of S prompts.
        length: tokens that the prompts cover.
    """

    def __init__(self, kept: KeptLayer, length: int) -> None:
        super().__init__(kept.window)
        self._kept, self._length = kept, length
        self.reset()

    def reset(self) -> None:
        """Forget what came after the prompt."""
        fill(self, self._kept, self._length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the stock layer, for states [B, G, q, d]; rows are repeated for samples and beams.

        Raises `CacheError` if the rows do not fit.
        """
        self.batch_repeat_interleave(repeats(len(self.keys), len(key_states)))
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return states

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1:
            super().batch_repeat_interleave(repeats)

    def state(self) -> Any:
        """What `set_state` takes to come back here; tensors are replaced, never changed."""
        return self.keys, self.values, self.cumulative_length

    def set_state(self, state: Any) -> None:
        """Go back to what `state` returned."""
        self.keys, self.values, self.cumulative_length = state


class KeptLinearLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A linear layer that goes on from copies of its states after the prompt.

    Args:
        kept: its states, of S prompts.
        length: tokens that the prompts cover.
    """

    is_croppable = False

    def __init__(self, kept: KeptLayer, length: int) -> None:
        super().__init__()
        self._kept, self._length = kept, length
        self.reset()

    def reset(self) -> None:
        """Forget what came after the prompt."""
        fill(self, self._kept, self._length)

    def fit(self, rows: int) -> None:
        """Repeat the states for samples and beams; raises `CacheError` if `rows` do not fit."""
        self.batch_repeat_interleave(repeats(len(self.conv_states[0]), rows))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises `CacheError`, unless no token is to be removed."""
        if tokens_to_remove:
            raise CacheError(
                f"Layer {self._kept.number} is of kind {self._kept.kind}: its state cannot go back "
                f"by tokens. Begin again with result.new_cache()."
            )

    def activate_past_recording(self) -> None:
        """Nothing is recorded: single tokens take the model's own single steps."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1:
            fill_linear(self, *(x.repeat_interleave(repeats, dim=0) for x in self.state()))

    def batch_select_indices(self, indices: Tensor) -> None:
        fill_linear(self, *(x[indices.to(x.device)] for x in self.state()))

    def state(self) -> Any:
        """What `set_state` takes to come back here; copies, since steps change the states."""
        return self.conv_states[0].clone(), self.recurrent_states[0].clone()

    def set_state(self, state: Any) -> None:
        """Go back to what `state` returned."""
        fill_linear(self, *state)


def kept_layer(kept: KeptLayer, length: int) -> KeptLinearLayer | KeptSlidingLayer:
    """The layer that goes on from `kept`."""
    return (KeptLinearLayer if kept.window is None else KeptSlidingLayer)(kept, length)


def is_kept(layer: Any) -> bool:
    """Whether `layer` is one of these."""
    return isinstance(layer, KeptLinearLayer | KeptSlidingLayer)
