"""`PackedLayer`: the compressed entries of one layer, the backend that reads them, and who may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracekv.backends import AttentionBackend, AttentionSpec, Backend
from gracekv.cache import LayerEntries
from gracekv.errors import CacheError


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """The compressed part of one layer; immutable and shared by every cache made from it.

    Attributes:
        entries: the compressed entries.
        prepared: what the backend holds for them.
        backend: what attends to them.
        length: logical tokens that the entries stand for.
    """

    entries: LayerEntries
    prepared: Any
    backend: AttentionBackend
    length: int

    @classmethod
    def of(cls, entries: LayerEntries, backend: Backend, length: int) -> PackedLayer:
        """The layer with `backend` resolved for it.

        Raises `BackendUnavailableError` if the backend cannot read such a layer.
        """
        spec = AttentionSpec.of(entries)
        reader = backend.resolve(spec)
        reader.require(spec)
        return cls(entries, reader.prepare(entries), reader, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLayer:
        # `copy.deepcopy(cache)` is how users fork a conversation: only the tail need be copied.
        return self


def repeats(known: int, rows: int, kind: str = "prompts") -> int:
    """How often each of the `known` rows of a cache is repeated to make `rows`.

    Raises `CacheError`, which calls the known rows `kind`, if `rows` is no multiple of them.
    """
    if rows % known:
        raise CacheError(
            f"The cache holds {known} {kind}, the model was given {rows} rows. Use as many rows, a "
            f"multiple of them, or cache.batch_select_indices first."
        )
    return rows // known
