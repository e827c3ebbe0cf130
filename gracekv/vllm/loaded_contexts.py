"""`LoadedContexts`: the contexts that a process holds in memory, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch

from gracekv.errors import StoreError
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.stored_context import StoredContext


class LoadedContexts:
    """Contexts by digest. Not safe to use from several threads.

    The least recently used are dropped beyond the limit, but for those that are asked to stay; a
    replaced one as soon as no request reads it.

    Args:
        limit: most bytes of entries, and of one context.
        device: where the entries of ragged contexts lie.

    Attributes:
        made: headers of contexts that are in no file, by name.
        dropped: digests of those of them that went for want of room, by name.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self._device = limit, device
        self.made: dict[str, ContextHeader] = {}
        self.dropped: dict[str, str] = {}
        # By digest, with the name under which it was read; the digest that a name means.
        self._held: OrderedDict[str, tuple[str, StoredContext]] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._used: Collection[str] = ()

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

    def hold(self, name: str, context: StoredContext, keep: Collection[str] = ()) -> None:
        """Hold a context; those with digests in `keep` stay.

        Raises `StoreError` if it is larger than the limit.
        """
        self.check_size(name, context)
        digest = context.header.digest
        self._make_room(context.bytes, keep)
        if context.header.kind == "ragged":
            context = context.to(self._device)
        self._held[digest] = name, context
        self.rename(name, digest, keep)

    def rename(self, name: str, digest: str, keep: Collection[str] = ()) -> None:
        """Let `name` mean the context of this digest; what it meant before is replaced."""
        self._newest[name] = digest
        self._drop_replaced(keep)

    def forget(self, name: str) -> bool:
        """Let `name` mean nothing; whether it meant a context that is in no file."""
        if name in self._newest:
            self.rename(name, "")
        return self.made.pop(name, None) is not None

    def retain(self, used: Collection[str]) -> None:
        """Keep replaced contexts as long as their digests are in `used`, and no longer."""
        self._used = used
        self._drop_replaced()

    def check_size(self, name: str, context: StoredContext) -> None:
        """Raise `StoreError` if the context is larger than the limit."""
        if context.bytes > self.limit:
            raise StoreError(
                f"Context {name!r} takes {context.bytes:,} bytes of memory, and contexts have "
                f"{self.limit:,}. Compress it more, or start with a larger limit_bytes."
            )

    def _is_replaced(self, digest: str) -> bool:
        return self._newest[self._held[digest][0]] != digest

    def _drop_replaced(self, keep: Collection[str] = ()) -> None:
        for digest in list(self._held):
            if self._is_replaced(digest) and digest not in self._used and digest not in keep:
                del self._held[digest]

    def _make_room(self, room: int, keep: Collection[str]) -> None:
        """Drop contexts until `room` more bytes are below the limit."""
        for digest in list(self._held):
            if self.bytes + room <= self.limit:
                return
            name = self._held[digest][0]
            alone = name in self.made and self.made[name].digest == digest
            # One that is replaced, or in no file, could not be read again.
            lost = alone or self._is_replaced(digest)
            if digest in keep or (digest in self._used and lost):
                continue
            del self._held[digest]
            if alone:
                del self.made[name]
                self.dropped[name] = digest
