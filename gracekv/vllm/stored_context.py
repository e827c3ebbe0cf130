"""`StoredContext`: a context in memory, as attention reads it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.vllm.header import ContextHeader


@dataclass(frozen=True, slots=True, eq=False)
class StoredContext:
    """A context in memory.

    Attributes:
        header: what it is.
        layers: entries of each layer; keys are rotated so that the token after them has position 0.
        offsets: int64 [L, G + 1], each layer's, on the device of the entries.
        addresses: int64 [L, 4] on the CPU, of each layer's keys, values, log multiplicities and
            offsets.
        longest: entries of the longest head.
    """

    header: ContextHeader
    layers: tuple[RaggedEntries, ...]
    offsets: Tensor = field(init=False)
    addresses: Tensor = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        offsets = torch.stack([layer.offsets for layer in self.layers])
        longest = int(offsets.diff().max())
        offsets = offsets.to(self.layers[0].keys.device)
        parts = [
            (x.keys, x.values, x.log_multiplicity, own)
            for x, own in zip(self.layers, offsets, strict=True)
        ]
        addresses = torch.tensor([[part.data_ptr() for part in layer] for layer in parts])
        made = {"offsets": offsets, "addresses": addresses, "longest": longest}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(layer.kv_bytes + layer.metadata_bytes for layer in self.layers)

    def to(self, device: torch.device) -> StoredContext:
        """The context with its entries on `device`."""
        if device == self.layers[0].device:
            return self
        layers = []
        for layer in self.layers:
            moved = {name: part.to(device) for name, part in layer.tensors().items()}
            layers.append(replace(layer, **{**moved, "offsets": layer.offsets}, sequences=1))
        return StoredContext(self.header, tuple(layers))


def heads_of_rank(heads: int, size: int, rank: int) -> tuple[int, int]:
    """The KV heads that a tensor-parallel rank computes, (first, last + 1).

    As vLLM deals them out: in order and evenly, or with fewer heads than ranks, each to several
    ranks.

    Args:
        heads: KV heads of the model.
        size: ranks.
        rank: of this process.
    """
    if heads >= size:
        share = heads // size
        return rank * share, (rank + 1) * share
    first = rank // (size // heads)
    return first, first + 1


def of_heads(layer: RaggedEntries, first: int, last: int) -> RaggedEntries:
    """The entries of heads [first, last), in memory of their own."""
    own = layer.rows(first, last)
    return replace(own, **{k: x.clone() for k, x in own.tensors().items()}, sequences=1)
