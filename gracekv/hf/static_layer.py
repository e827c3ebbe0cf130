"""A cache layer whose tail is preallocated and whose length is on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gracekv.errors import CacheError
from gracekv.hf.layer import GraceLayer, PackedStates
from gracekv.registry.hyperparameter import parts_of


class StaticGraceLayer(GraceLayer):
    """A packed layer and a tail of fixed capacity, for compiled steps and CUDA graphs.

    Appending writes at the position in `length`, on the device, so every step of one token has the
    same shapes and addresses and does not wait for the device.

    Args:
        source: the layer to continue; its tail is copied.
        rows: B, continuations.
        capacity: C, places of the tail; at least the tokens that it holds.

    Attributes:
        length: int64 [B], tokens since compression, the same in all rows.
        capacity: C.

    Raises:
        CacheError: the rows or the tail do not fit.
    """

    is_compileable = True
    length: Tensor

    def __init__(self, source: GraceLayer, rows: int, capacity: int) -> None:
        super().__init__(source.packed)
        tail = source.tail_length
        if capacity < max(tail, 1):
            raise CacheError(
                f"A static tail must hold the {tail} tokens of the tail so far, and at least one; "
                f"got capacity={capacity}."
            )
        # Normal tensors can be written both inside and outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._keys, self._values = source.resized(rows, capacity, tail)
            self.rows = source.rows_of(rows)
            self.length = torch.full((rows,), tail, device=self._keys.device)
        self.capacity = capacity
        if not torch.compiler.is_compiling():
            # Others would be copied in every step of a compiled model with CUDA graphs.
            for tensor in (self._keys, self._values, self.length, *parts_of(self.packed.prepared)):
                if isinstance(tensor, Tensor):
                    torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def tail_length(self) -> int:
        """Tokens since compression; waits for the device."""
        return int(self.length[0])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PackedStates, PackedStates]:
        """Append [B, G, q, d] keys and values; returns the states for both.

        Raises `CacheError` if they do not fit the packed part or the rows; on a CPU also if the
        tail is full. On a GPU the mask function raises that, except in compiled steps.
        """
        key_states = key_states.to(value_states.dtype)
        rows, _, new, _ = key_states.shape
        if not torch.compiler.is_compiling():
            self._check(key_states)
            if rows != self.batch:
                raise CacheError(
                    f"The static cache was made for {self.batch} rows, the model was given {rows}. "
                    f"Use cache.with_static_tail(capacity, rows={rows})."
                )
            if self.length.is_cpu and self.tail_length + new > self.capacity:
                raise CacheError(tail_is_full(self.tail_length + new, self.capacity))
        place = self.length[:1]
        if new > 1:
            place = place + torch.arange(new, device=place.device)
        keys, values = self._tail(self.capacity)
        keys.index_copy_(2, place, key_states.detach())
        values.index_copy_(2, place, value_states.detach())
        self.length.add_(new)
        states = PackedStates(self, keys, values)
        return states, states

    @property
    def logical_length(self) -> Tensor:  # type: ignore[override]
        """int64 [], tokens seen so far, on the device."""
        return self.length[0] + self.packed.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers all places of the tail."""
        return self.capacity, self.packed.length

    def get_max_length(self) -> int:
        return self.packed.length + self.capacity

    def reset(self) -> None:
        """Forget the tail; packed part and storage stay.

        The rows continue the packed sequences in order again if their number is a multiple.
        """
        self.length.zero_()
        if self.batch % self.packed.entries.sequences == 0:
            self.rows = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -`tokens_to_remove` tokens; raises as the growing layer does."""
        self.check_crop(tokens_to_remove)
        self.length.add_(tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the rows `indices` int64 [B], in place if their number does not change.

        The addresses of compiled steps then stay valid.
        """
        keys, values = self._tail(self.capacity)
        super().batch_select_indices(indices)
        new_keys, new_values = self._tail(self.capacity)
        if len(new_keys) == len(keys):
            self._keys, self._values = keys.copy_(new_keys), values.copy_(new_values)
        else:
            self.length = self.length[:1].expand(len(new_keys)).clone()


def tail_is_full(needed: int, capacity: int) -> str:
    """The message of the `CacheError` for more tokens than a static tail holds."""
    return (
        f"The static tail holds {capacity} tokens since compression; this step needs {needed}. Use "
        f"cache.with_static_tail(capacity={max(2 * capacity, needed)}), which copies the tail, or "
        f"a growing cache."
    )
