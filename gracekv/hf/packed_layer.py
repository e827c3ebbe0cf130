"""`PackedLayer`: the compressed entries of one layer, and the backend that reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from gracekv.backends import AttentionBackend, AttentionSpec, Backend
from gracekv.cache import LayerEntries
from gracekv.errors import CacheError


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """The compressed part of one layer; immutable and shared by every cache made from it.

    Attributes:
        entries: the compressed entries.
        prepared: the backend's data for them.
        backend: the attention implementation that reads them.
        length: logical tokens that the entries stand for.
    """

    entries: LayerEntries
    prepared: Any
    backend: AttentionBackend
    length: int

    @classmethod
    def all_of(cls, layers: Sequence[LayerEntries], backend: Backend, length: int) -> list[Self]:
        """The layers with `backend` resolved for each.

        Raises `BackendUnavailableError` if the backend cannot read such a layer.
        """
        specs = [AttentionSpec.of(entries) for entries in layers]
        readers = {spec: backend.resolve(spec) for spec in dict.fromkeys(specs)}
        for spec, reader in readers.items():
            reader.require(spec)
        result: list[Self] = []
        pairs = zip(specs, layers, strict=True)
        for (reader, _), group in itertools.groupby(pairs, lambda x: (readers[x[0]], x[0].device)):
            alike = [entries for _, entries in group]
            prepared = reader.prepare_all(alike)
            result += [cls(x, y, reader, length) for x, y in zip(alike, prepared, strict=True)]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLayer:
        # Users fork a conversation by `copy.deepcopy(cache)`; only the tail need be copied.
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises `CacheError`: the entries belong to the result."""
        raise CacheError("Caches cannot be pickled; use result.save and gracekv.load(path, model).")


def repeats(cached: int, rows: int, kind: str = "prompts") -> int:
    """How often each of the `cached` rows of a cache is repeated to make `rows`.

    Raises `CacheError` if `rows` is not a multiple of `cached`; `kind` names the rows in it.
    """
    if rows % cached:
        raise CacheError(
            f"The cache holds {cached} {kind}, the model was given {rows} rows. Use a multiple of "
            f"{cached} rows, or call cache.batch_select_indices first."
        )
    return rows // cached
