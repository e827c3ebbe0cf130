"""Bytes that a result keeps alive, by device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from gracekv.hf.cache import GraceCache


def held_memory(cache: GraceCache, *parts: Any) -> dict[str, int]:
    """Bytes by device, such as {"cuda:0": ..., "cpu": ...}, of `cache` and the tensors in `parts`.

    Tensors are found in dataclasses, tuples, lists and mappings; memory that several share counts
    once. What the backend holds counts where its layer lies.
    """
    storages = {}
    for tensor in _tensors((cache.packed, *parts)):
        storage = tensor.untyped_storage()
        storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    total: Counter[str] = Counter()
    for (device, _), size in storages.items():
        total[device] += size
    for layer in cache.grace_layers:
        backend, prepared = layer.packed.backend, layer.packed.prepared
        total[str(layer.packed.ragged.device)] += backend.held_bytes(prepared)
    return dict(total)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
