"""`StoredContext`: a context in memory, as attention reads it; `LoadedContexts` bounds them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.errors import StoreError
from gracekv.kernels.addresses import address
from gracekv.vllm.header import ContextHeader


@dataclass(frozen=True, slots=True, eq=False)
class StoredContext:
    """A context in memory; `of` makes one.

    Attributes:
        header: describes it.
        layers: entries of each layer; keys are rotated so that the token after them has position 0.
        places: number of entries of the longest head of all ranks.
        offsets: int64 [L, G + 1] of the layers, on the device of the entries.
        addresses: int64 [L, 4] on the CPU: addresses of each layer's keys, values, log
            multiplicities and offsets.
        longest: number of entries of the longest head of this rank.
    """

    header: ContextHeader
    layers: tuple[RaggedEntries, ...]
    places: int
    offsets: Tensor
    addresses: Tensor
    longest: int

    @classmethod
    def of(
        cls, header: ContextHeader, layers: tuple[RaggedEntries, ...], places: int | None = None
    ) -> StoredContext:
        """A context of these entries; `places` are by default those of this rank."""
        offsets = torch.stack([layer.offsets for layer in layers])
        longest, device = int(offsets.diff().max()), layers[0].device
        offsets = offsets.to(device)

        def addresses_of(x: RaggedEntries, starts: Tensor) -> list[int]:
            return [
                address("keys", x.keys, x.dtype, x.entries, x.dim, device=device),
                address("values", x.values, x.dtype, x.entries, x.dim, device=device),
                address("bias", x.log_multiplicity, torch.float32, x.entries, device=device),
                address("offsets", starts, torch.int64, x.heads + 1, device=device),
            ]

        addresses = torch.tensor(list(map(addresses_of, layers, offsets)))
        return cls(header, layers, places or longest, offsets, addresses, longest)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.kv_bytes + layer.metadata_bytes for layer in self.layers)

    def to(self, device: torch.device) -> StoredContext:
        """The context with its entries on `device`."""
        if device == self.layers[0].device:
            return self
        layers = tuple(x.mapped(lambda tensor: tensor.to(device)) for x in self.layers)
        return StoredContext.of(self.header, layers, self.places)


def heads_of_rank(heads: int, size: int, rank: int) -> tuple[int, int]:
    """The KV heads that vLLM gives to a tensor-parallel rank, as (first, last + 1).

    Ranks get equal shares in order; if there are fewer heads than ranks, several share a head.

    Args:
        heads: KV heads of the model.
        size: number of ranks.
        rank: rank of this process.
    """
    first, after = (x * heads // size for x in (rank, rank + 1))
    return first, max(after, first + 1)


class LoadedContexts:
    """The contexts in a process's memory, by digest. Not thread-safe.

    Beyond the limit, the least recently used are dropped, except for those that requests read. A
    replaced context is dropped as soon as no request reads it.

    Args:
        limit: maximum bytes of all entries, and of one context.
        device: device of the entries.

    Attributes:
        made: headers of unsaved contexts, by name.
        dropped: names and digests of unsaved contexts that were dropped for lack of room.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self._device = limit, device
        self.made: dict[str, ContextHeader] = {}
        self.dropped: set[tuple[str, str]] = set()
        # Contexts by digest, each with the name under which it was read; digests by name.
        self._held: OrderedDict[str, tuple[str, StoredContext]] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._used: Set[str] = frozenset()

    @property
    def digests(self) -> list[str]:
        """Digests of all contexts, the least recently used first."""
        return list(self._held)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(context.bytes for _, context in self._held.values())

    def get(self, digest: str) -> StoredContext:
        """The context, now the most recently used; `KeyError` if it is not in memory."""
        self._held.move_to_end(digest)
        return self._held[digest][1]

    def check(self, name: str, size: int) -> None:
        """Raise `StoreError` if a context of `size` bytes is larger than the limit."""
        if size > self.limit:
            raise StoreError(
                f"Context {name!r} takes {size:,} bytes of memory, and the limit is "
                f"{self.limit:,}. Compress it more, or start with a larger limit_bytes."
            )

    def hold(self, name: str, context: StoredContext) -> None:
        """Add a context; `StoreError` if it is larger than the limit."""
        self.check(name, context.bytes)
        self._make_room(context.bytes, name)
        self._held[context.header.digest] = name, context.to(self._device)
        self.rename(name, context.header.digest)

    def rename(self, name: str, digest: str) -> None:
        """Bind `name` to the context with this digest, which replaces the previous one."""
        self._newest[name] = digest
        self._drop_replaced()

    def forget(self, name: str) -> bool:
        """Unbind `name`; return whether it was bound to an unsaved context."""
        self._newest.pop(name, None)
        self._drop_replaced()
        return self.made.pop(name, None) is not None

    def retain(self, used: Set[str]) -> None:
        """Keep the contexts with these digests, even replaced ones, until the next call."""
        self._used = used
        self._drop_replaced()

    def _drop_replaced(self) -> None:
        for digest in self._held.keys() - self._used:
            if self._newest.get(self._held[digest][0]) != digest:
                del self._held[digest]

    def _make_room(self, room: int, replaced: str) -> None:
        """Drop contexts until `room` more bytes fit once those named `replaced` are dropped."""
        idle = [x for x in self._held if x not in self._used]
        old = {x for x in idle if self._held[x][0] == replaced}
        room -= sum(self._held[x][1].bytes for x in old)
        for digest in [x for x in idle if x not in old]:
            if self.bytes + room <= self.limit:
                return
            name, _ = self._held.pop(digest)
            self._newest.pop(name, None)
            if name in self.made and self.made[name].digest == digest:
                del self.made[name]
                self.dropped.add((name, digest))
