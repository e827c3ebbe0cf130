"""How often the rows of a cache are repeated for samples and beams."""

from __future__ import annotations

from gracekv.errors import CacheError


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
