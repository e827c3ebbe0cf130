"""`LoadedContexts`: the contexts that a process holds in memory, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

import torch

from gracekv.errors import StoreError
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.stored_context import StoredContext


class LoadedContexts:
    """Contexts by digest. Not safe to use from several threads.

    The least recently used are dropped beyond the limit, but for those that requests read; a
    replaced one as soon as none does.

    Args:
        limit: most bytes of entries, and of one context.
        device: where the entries lie.

    Attributes:
        made: headers of contexts that are in no file, by name.
        dropped: names and digests of those of them that went for want of room.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self._device = limit, device
        self.made: dict[str, ContextHeader] = {}
        self.dropped: set[tuple[str, str]] = set()
        # By digest, with the name under which it was read; the digest that a name means.
        self._held: OrderedDict[str, tuple[str, StoredContext]] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._used: Set[str] = frozenset()

    @property
    def digests(self) -> list[str]:
        """Of all, the least recently used first."""
        return list(self._held)

    @property
    def bytes(self) -> int:
        """Of the entries in memory."""
        return sum(context.bytes for _, context in self._held.values())

    def get(self, digest: str) -> StoredContext:
        """The context, which is used now; `KeyError` if it is not held."""
        self._held.move_to_end(digest)
        return self._held[digest][1]

    def check(self, name: str, size: int) -> None:
        """Raise `StoreError` if a context of `size` bytes is larger than the limit."""
        if size > self.limit:
            raise StoreError(
                f"Context {name!r} takes {size:,} bytes of memory, and contexts have "
                f"{self.limit:,}. Compress it more, or start with a larger limit_bytes."
            )

    def hold(self, name: str, context: StoredContext) -> None:
        """Hold a context; raises `StoreError` if it is larger than the limit."""
        self.check(name, context.bytes)
        self._make_room(context.bytes)
        self._held[context.header.digest] = name, context.to(self._device)
        self.rename(name, context.header.digest)

    def rename(self, name: str, digest: str) -> None:
        """Let `name` mean the context of this digest; what it meant before is replaced."""
        self._newest[name] = digest
        self._drop_replaced()

    def forget(self, name: str) -> bool:
        """Let `name` mean nothing; whether it meant a context that is in no file."""
        if name in self._newest:
            self.rename(name, "")
        return self.made.pop(name, None) is not None

    def retain(self, used: Set[str]) -> None:
        """Keep contexts as long as their digests are in `used`; replaced ones no longer."""
        self._used = used
        self._drop_replaced()

    def _drop_replaced(self) -> None:
        for digest in self._held.keys() - self._used:
            name = self._held[digest][0]
            if self._newest[name] != digest:
                del self._held[digest]

    def _make_room(self, room: int) -> None:
        """Drop contexts until `room` more bytes are below the limit."""
        for digest in [x for x in self._held if x not in self._used]:
            if self.bytes + room <= self.limit:
                return
            name, _ = self._held.pop(digest)
            if name in self.made and self.made[name].digest == digest:
                del self.made[name]
                self.dropped.add((name, digest))
