"""Layers that are worked on together, so that a GPU does much of one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from gracekv.cache.base import RaggedEntries
from gracekv.cache.quantised import QuantisedEntries

Entries = TypeVar("Entries", RaggedEntries, QuantisedEntries)


def batches(
    layers: Sequence[RaggedEntries], size: Callable[[RaggedEntries], int], limit: int
) -> Iterator[slice]:
    """Consecutive layers on one device whose number times the largest `size` is within `limit`.

    On the CPU each layer is a batch of its own, whose numbers stay in the processor's cache.
    """
    first, largest = 0, 0
    for number, layer in enumerate(layers):
        largest = max(largest, size(layer))
        alone = layer.device.type == "cpu" or layer.device != layers[first].device
        if number > first and (alone or (number + 1 - first) * largest > limit):
            yield slice(first, number)
            first, largest = number, size(layer)
    yield slice(first, len(layers))


def apart(batch: Entries, layers: int) -> list[Entries]:
    """The layers of a batch, each one a sequence of it, in memory of their own."""
    if layers == 1:
        return [batch]
    views = [batch.sequence(number) for number in range(layers)]
    tensors = [x for view in views for x in view.tensors().values()]
    copies = list(map(torch.empty_like, tensors))
    for dtype in {x.dtype for x in tensors}:
        same = [n for n, x in enumerate(tensors) if x.dtype == dtype]
        # One kernel for many tensors.
        torch._foreach_copy_([copies[n] for n in same], [tensors[n] for n in same])
    made = iter(copies)
    return [view.mapped(lambda _: next(made)) for view in views]
