"""`GraceCache`: compressed prompts as a transformers `Cache`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gracekv.backends import Auto, Backend
from gracekv.backends.base import sequence_of_row
from gracekv.cache import CompressedCache, Occupancy
from gracekv.decode.limit import CutHistory, Limit
from gracekv.distributed import head_shard
from gracekv.errors import CacheError
from gracekv.hf.layer import GraceLayer
from gracekv.hf.packed_layer import PackedLayer
from gracekv.hf.resumed_layer import ResumedStates, is_resumed, resumed_layer
from gracekv.hf.static_layer import StaticGraceLayer
from gracekv.prefill.model_layers import head_sizes
from gracekv.registry.hyperparameter import parts_of


class GraceCache(Cache):  # type: ignore[misc]
    """Packed prompts and their continuations, for `model.generate(ids, past_key_values=cache)`.

    The packed part covers all prompt tokens but the last; `generate` is given the whole prompt and
    feeds the last token again. It is immutable and shared: caches from `with_empty_tail` and
    `deepcopy`, and the rows of a batch, differ only in their tails.

    Several prompts are padded on the left to the longest, as `generate` expects; padding takes no
    entries.

    Args:
        packed: the compressed cache of one prompt, or of several.
        backend: the attention backend, resolved once per layer; default `Auto()`.

    Attributes:
        layers: packed part and tail of each compressed layer, stock cache layers for the others,
            and both for hybrid layers, which have states in addition to attention.

    The model must be attached (`gracekv.hf.attach`); otherwise the first step raises `CacheError`.
    """

    layers: list[Any]
    # Whether `ReplayedForward` makes the model's inputs, which then need no checks.
    is_replayed = False
    # The most that the cache may hold while it grows, or None.
    limit: Limit | None = None

    def __init__(self, packed: CompressedCache, backend: Backend | None = None) -> None:
        backend = backend or Auto()
        self.padding, self._other_layers = packed.padding, packed.other_layers
        layers = [GraceLayer(x) for x in PackedLayer.all_of(packed.layers, backend, packed.length)]
        super().__init__(layers=[])
        self._place(layers)

    def _place(self, compressed: Sequence[GraceLayer]) -> None:
        """Make `layers`, in the model's order."""
        self.grace_layers = tuple(compressed)
        states, packed = {state.number: state for state in self._other_layers}, iter(compressed)
        count = len(compressed) + sum(not x.beside_entries for x in self._other_layers)
        self.layers, length = [], self.packed_length
        for number in range(count):
            state = states.get(number)
            layer = next(packed) if state is None or state.beside_entries else None
            self.layers.append(layer if state is None else resumed_layer(state, length, layer))

    def with_empty_tail(self) -> GraceCache:
        """A cache with an empty tail over the same packed part."""
        twin = copy.copy(self)
        twin._place([GraceLayer(layer.packed) for layer in self.grace_layers])
        return twin

    def with_static_tail(self, capacity: int, *, rows: int | None = None) -> GraceCache:
        """A cache whose tail is preallocated on the device, for `torch.compile` and CUDA graphs.

        On GPUs, `model.generate` compiles its decoding steps over it (`cache.is_compileable`). The
        tail so far is copied; to continue from a full tail, make another, larger one.

        Args:
            capacity: tokens since compression that it can hold.
            rows: B, continuations; default: as many as this cache has.

        Raises `CacheError` if rows or tail do not fit, or if there are uncompressed layers.
        """
        if self._other_layers:
            first = self._other_layers[0]
            raise CacheError(
                f"Layer {first.number} is of kind {first.kind}, whose stock cache grows; a "
                f"static tail needs compressed layers only. Use a growing cache."
            )
        rows = self.grace_layers[0].batch if rows is None else rows
        twin = copy.copy(self)
        twin._place([StaticGraceLayer(layer, rows, capacity) for layer in self.grace_layers])
        return twin

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -`tokens_to_remove` tokens, which transformers counts negatively.

        Raises `CacheError` if a layer cannot go back that far; then no layer changes.
        """
        for layer in (*self.grace_layers, *filter(is_resumed, self.layers)):
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def mark(self) -> Callable[[], None]:
        """Return a function that restores this state, provided that only tokens were added."""
        tail = self.grace_layers[0].logical_length
        states = [(layer, layer.state()) for layer in self.layers if is_resumed(layer)]

        def back() -> None:
            for layer in self.grace_layers:
                # An error inside the model leaves the layers at different lengths.
                layer.crop(int(tail - layer.logical_length))
            for layer, state in states:
                layer.set_state(state)

        return back

    @property
    def packed(self) -> CompressedCache:
        """The compressed entries of all layers."""
        layers, least = tuple(x.packed.entries for x in self.grace_layers), min(self.padding)
        padding = tuple(x - least for x in self.padding)
        return CompressedCache(layers, self.packed_length - least, padding, self._other_layers)

    @property
    def accounting(self) -> Occupancy:
        """Current and largest number of entries and bytes, of packed prompts and tails."""
        entries = size = 0
        for layer in self.grace_layers:
            packed = layer.packed.entries
            new = layer.batch * packed.heads * int(layer.tail_length)
            entries += int(packed.lengths.sum()) + new
            size += packed.kv_bytes + 2 * new * packed.dim * packed.dtype.itemsize
        return Occupancy(entries, size, entries, size)

    @property
    def history(self) -> CutHistory:
        """The entries that each cut of a limit left; `CacheError` unless they were recorded."""
        raise CacheError(
            "This cache has no history of cuts. Generate one answer, a single row, on "
            "result.new_cache(limit), or begin result.chat(limit), with Limit(..., history=True)."
        )

    def make_room(self, tokens: Tensor, mask: Any) -> None:
        """Called before a step of `tokens` [B, n, ...]; a cache with a limit may cut itself."""

    def fit_rows(self, rows: int) -> None:
        """Repeat states for `rows` rows; other layers adapt when they are updated.

        Raises `CacheError` if this many rows cannot continue the packed prompts.
        """
        for layer in self.layers:
            if isinstance(layer, ResumedStates):
                layer.fit(rows)

    @property
    def packed_length(self) -> int:
        """Logical tokens that the packed part stands for."""
        return self.grace_layers[0].packed.length

    def packed_padding(self, rows: int, device: torch.device) -> Tensor:
        """int64 [rows]: by how many tokens each row's prompt is shorter than the longest.

        Raises `CacheError` if this many rows cannot continue the packed prompts.
        """
        layer = self.grace_layers[0]
        of_row = sequence_of_row(layer.rows_of(rows), rows, len(self.padding), device)
        return torch.tensor(self.padding, device=device)[of_row.to(device)]

    def packed_mask(self, rows: int, device: torch.device) -> Tensor:
        """bool [rows, packed_length]: False where a row's prompt is padded.

        Raises `CacheError` if this many rows cannot continue the packed prompts.
        """
        padding = self.packed_padding(rows, device)
        return torch.arange(self.packed_length, device=device) >= padding[:, None]

    def warm_up(self, model: Any) -> None:
        """Build what the backend holds for `model`'s decoding steps, so `held_bytes` counts it.

        Otherwise the first step does.
        """
        heads = head_sizes(model)[0] // head_shard(model).ranks
        for layer in self.grace_layers:
            layer.packed.backend.warm_up(layer.packed.prepared, heads)

    @property
    def held_bytes(self) -> int:
        """Bytes that the backend holds in addition to the packed tensors (padding, copies)."""
        return sum(x.packed.backend.held_bytes(x.packed.prepared) for x in self.grace_layers)

    def __repr__(self) -> str:
        tail: Any = self.grace_layers[0].tail_length
        return f"GraceCache(packed_length={self.packed_length}, tail={tail}, layers={len(self)})"


def held_memory(cache: GraceCache, *parts: Any) -> dict[str, int]:
    """Bytes by device, such as {"cuda:0": ..., "cpu": ...}, of `cache` and the tensors in `parts`.

    Tensors are found in dataclasses, tuples, lists and mappings; memory that several share counts
    once. The backend's copies count on the device of their layer.
    """
    storages = {}
    for tensor in (x for x in parts_of((cache.packed, *parts)) if isinstance(x, Tensor)):
        storage = tensor.untyped_storage()
        storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    total: Counter[str] = Counter()
    for (device, _), size in storages.items():
        total[device] += size
    for packed in (layer.packed for layer in cache.grace_layers):
        total[str(packed.entries.device)] += packed.backend.held_bytes(packed.prepared)
    return dict(total)
