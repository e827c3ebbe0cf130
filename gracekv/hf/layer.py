"""One layer of `GraceCache`: a shared packed part and its own growing tail."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from gracekv.backends.base import AttentionStep, sequence_of_row
from gracekv.errors import CacheError
from gracekv.hf.packed_layer import PackedLayer, repeats

# Places that the tail starts with; it doubles from there.
_FIRST_CAPACITY = 64


class PackedStates:
    """A layer's packed part and tail, which `update` returns in place of key and value states.

    Only gracekv's attention function can read it. Anywhere else, the first attribute access or
    torch operation raises a `CacheError` that says what to do.

    Attributes:
        layer: the layer of the cache.
        keys: [B, G, S, d] of the tail.
        values: [B, G, S, d] of the tail.
    """

    __slots__ = ("keys", "layer", "values")

    def __init__(self, layer: GraceLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __getitem__(self, at: Any) -> NoReturn:
        _refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse()


def _refuse() -> NoReturn:
    raise CacheError(
        "A compressed cache was read by something other than gracekv's attention. To run the "
        "model, call gracekv.hf.attach(model) first, and again after detach(model) or "
        "model.set_attn_implementation(...). Other code cannot read its keys and values: "
        "result.new_cache() is for model.generate and the model's forward."
    )


def check_alike(old: Any, new: Tensor) -> None:
    """Raise `CacheError` unless states `new` [B, G, q, d] have the dtype and device of `old`."""
    if (new.dtype, new.device) != (old.dtype, old.device):
        raise CacheError(
            f"This cache is {old.dtype} on {old.device}, the model computes in {new.dtype} on "
            f"{new.device}. Compress again after moving or converting the model, and under the "
            f"same autocast as generation."
        )


class GraceLayer(CacheLayerMixin):  # type: ignore[misc]
    """A packed layer and a dense tail [B, G, S, d] behind transformers' cache-layer interface.

    The tail's storage doubles when it is full, so appending a token copies O(1) tokens on average.
    Rows of a batch (samples, beams, returned sequences) share the packed part and differ only in
    the tail.

    Attributes:
        packed: the compressed part.
        tail_length: tokens since compression.
        rows: int64 [B] on the packed part's device, the packed sequence that each row continues;
            or None if the sequences are in order, each with as many consecutive rows.
    """

    is_croppable = True
    supports_early_init = False

    # None if the tail grows: its length is then known on the host.
    length: Tensor | None = None

    def __init__(self, packed: PackedLayer) -> None:
        super().__init__()
        self.packed = packed
        self.rows: Tensor | None = None
        self._used = 0
        self._keys: Any = None
        self._values: Any = None

    @property
    def tail_length(self) -> int:
        """Tokens since compression."""
        return self._used

    @property
    def logical_length(self) -> int:
        """Tokens seen so far: those of the packed part and of the tail."""
        return self.packed.length + self._used

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `update` makes the tail for states [B, G, q, d]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PackedStates, PackedStates]:
        """Append [B, G, q, d] keys and values; returns them, packed part included, for both.

        Raises `CacheError` if they do not fit the packed part or the tail's batch.
        """
        # Under autocast, rotated keys are float32, while values have the products' dtype.
        key_states = key_states.to(value_states.dtype)
        self._check(key_states)
        batch, _, new, _ = key_states.shape
        end = self._used + new
        keys = self._keys
        if (
            keys is None
            or keys.shape[0] != batch
            or keys.shape[2] < end
            # A buffer made in inference mode cannot be written to outside it.
            or (keys.is_inference() and not torch.is_inference_mode_enabled())
        ):
            capacity = 0 if keys is None else keys.shape[2]
            self._grow(batch, capacity if capacity >= end else max(_FIRST_CAPACITY, 2 * end))
        new_keys, new_values = self._tail(end)
        new_keys[:, :, self._used :] = key_states.detach()
        new_values[:, :, self._used :] = value_states.detach()
        self._used = end
        states = PackedStates(self, new_keys, new_values)
        return states, states

    def record(self, step: AttentionStep) -> None:
        """Called with each step; layers of a cache with a limit record the queries."""

    def _tail(self, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, G, length, d] of the tail's storage."""
        return self._keys[:, :, :length], self._values[:, :, :length]

    def _check(self, key_states: Tensor) -> None:
        packed = self.packed.entries
        heads, dim = packed.heads, packed.dim
        if key_states.shape[1] != heads or key_states.shape[-1] != dim:
            raise CacheError(
                f"This cache holds {heads} KV heads of dimension {dim} per layer, the model has "
                f"{key_states.shape[1]} of {key_states.shape[-1]}. Use it with the model that it "
                f"was made from."
            )
        check_alike(packed, key_states)

    def _grow(self, batch: int, capacity: int) -> None:
        """Allocate storage for `batch` rows and `capacity` places, and copy the tail to it."""
        self._keys, self._values = self.resized(batch, capacity, self._used)
        self.rows = self.rows_of(batch)

    def resized(self, batch: int, capacity: int, length: int) -> tuple[Tensor, Tensor]:
        """Zeros [B, G, capacity, d] for keys and for values, with the first `length` tokens copied.

        Raises `CacheError` if `batch` is not a multiple of the continuations so far.
        """
        packed = self.packed.entries
        times = repeats(self.batch if length else batch, batch, "continuations")
        shape = (batch, packed.heads, capacity, packed.dim)

        def copied(old: Any) -> Tensor:
            buffer = torch.zeros(shape, dtype=packed.dtype, device=packed.device)
            if old is not None and length:
                # `generate` repeats its own rows for beams and returned sequences, not the cache's.
                buffer[:, :, :length] = old[:, :, :length].repeat_interleave(times, dim=0)
            return buffer

        return copied(self._keys), copied(self._values)

    def rows_of(self, batch: int) -> Tensor | None:
        """`rows` int64 [B] for `batch` rows, each continuation repeated.

        Raises `CacheError` if they do not fit.
        """
        known = self.packed.entries.sequences if self.rows is None else len(self.rows)
        times = repeats(known, batch)
        return None if self.rows is None else self.rows.repeat_interleave(times)

    @property
    def batch(self) -> int:
        """B, rows of the tail, or while it is empty, of the selected or packed sequences."""
        if self._keys is not None:
            return len(self._keys)
        return self.packed.entries.sequences if self.rows is None else len(self.rows)

    def get_seq_length(self) -> int:
        return self.logical_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the tail; its offset skips the packed part's tokens."""
        return self._used + int(query_length), self.packed.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget the tail; the packed part stays."""
        self._used, self.rows = 0, None
        self._keys = self._values = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -`tokens_to_remove` tokens (transformers counts them negatively).

        Raises `CacheError` for a positive number, and beyond the tail.
        """
        self.check_crop(tokens_to_remove)
        self._used += tokens_to_remove

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `CacheError` if `crop` would fail."""
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop takes minus the number of tokens to remove; got {tokens_to_remove}. To keep "
                f"n tokens call crop(n - cache.get_seq_length())."
            )
        if -tokens_to_remove > self.tail_length:
            raise CacheError(
                f"Only the {self.tail_length} tokens since compression can be removed, not "
                f"{-tokens_to_remove}: the others are merged. Compress the shorter prompt instead."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._keys is not None:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        index = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        if self.packed.entries.sequences > 1:
            self.rows = self._selected_rows(index)
        if self._keys is None:
            return
        index = index.to(self._keys.device)
        # All places, not only the used ones: beams are reordered at every token, and storage cut
        # to size would have to grow again each time.
        self._keys, self._values = (x.index_select(0, index) for x in (self._keys, self._values))

    def _selected_rows(self, index: Tensor) -> Tensor | None:
        """`rows` after taking the continuations `index`; None where they are in order again."""
        device = self.packed.entries.device
        count, sequences = self.batch, self.packed.entries.sequences
        rows = sequence_of_row(self.rows, count, sequences, device)[index.to(device)]
        # Beams stay with their prompt, so this is the usual case; backends are fastest with None.
        if len(rows) % sequences == 0:
            ordered = torch.arange(sequences, device=device)
            if torch.equal(rows, ordered.repeat_interleave(len(rows) // sequences)):
                return None
        return rows
