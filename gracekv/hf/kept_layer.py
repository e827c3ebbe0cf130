"""Layers of `GraceCache` that are not compressed: transformers' own, begun after the prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from gracekv.errors import CacheError
from gracekv.prefill.kept import KeptLayer
from gracekv.prefill.stock_cache import fill


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
        known, rows = len(self.keys), len(key_states)
        if rows % known:
            raise CacheError(
                f"The cache holds {known} prompts, the model was given {rows} rows. Use as many "
                f"rows, a multiple of them, or cache.batch_select_indices first."
            )
        self.batch_repeat_interleave(rows // known)
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


def is_kept(layer: Any) -> bool:
    """Whether `layer` is one of these."""
    return isinstance(layer, KeptSlidingLayer)
