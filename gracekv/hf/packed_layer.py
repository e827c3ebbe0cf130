"""`PackedLayer`: the compressed entries of one layer, and the backend that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracekv.backends import AttentionBackend, AttentionSpec, Backend
from gracekv.cache import LayerEntries


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """The compressed part of one layer; immutable and shared by every cache made from it.

    Attributes:
        ragged: the entries.
        prepared: what the backend holds for them.
        backend: what attends to them.
        length: logical tokens that the entries stand for.
    """

    ragged: LayerEntries
    prepared: Any
    backend: AttentionBackend
    length: int

    @classmethod
    def of(cls, ragged: LayerEntries, backend: Backend, length: int) -> PackedLayer:
        """The layer with `backend` resolved for it.

        Raises `BackendUnavailableError` if the backend cannot read such a layer.
        """
        spec = AttentionSpec.of(ragged)
        reader = backend.resolve(spec)
        reader.require(spec)
        return cls(ragged, reader.prepare(ragged), reader, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLayer:
        # `copy.deepcopy(cache)` is how users fork a conversation: only the tail need be copied.
        return self
