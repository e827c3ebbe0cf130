"""What the `triton` backend holds for a layer, and what may be asked of it.

Kernels do not check addresses, so shapes are checked before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracekv.backends.triton_splits import SplitTables
from gracekv.cache.coded import CodedEntries
from gracekv.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class TritonLayer:
    """One layer with its tables of splits.

    Attributes:
        keys: [E, d], rows contiguous.
        values: [E, d].
        bias: float32 [E], log multiplicity.
        heads: G.
        sequences: S.
        tables: the splits.
        capability: of the GPU.
        programs: how many kernel programs to aim at.
        coded: quantised entries, the splits of each in `tables` too.
        copied: bytes of keys and values that had to be copied to make their rows contiguous.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    heads: int
    sequences: int
    tables: SplitTables
    capability: tuple[int, int]
    programs: int
    coded: tuple[CodedEntries, ...]
    copied: int


def check_packed(query: Tensor, prepared: TritonLayer, rows: Tensor | None) -> None:
    """Raise `ShapeError` unless query and rows fit; the kernel itself does not check addresses.

    Args:
        query: [B, H, Tq, d].
        prepared: the packed part.
        rows: int64 [B], or None.
    """
    batch, heads, _, dim = query.shape
    if dim != prepared.keys.shape[1] or query.dtype != prepared.keys.dtype:
        raise ShapeError(
            f"The packed keys are {prepared.keys.dtype} of dimension {prepared.keys.shape[1]}; got "
            f"queries in {query.dtype} of dimension {dim}."
        )
    if heads % prepared.heads:
        raise ShapeError(
            f"Query heads come in equal groups for {prepared.heads} KV heads; got {heads}."
        )
    fits = batch % prepared.sequences == 0 if rows is None else rows.shape == (batch,)
    if not fits:
        raise ShapeError(
            f"A cache of {prepared.sequences} sequences takes a multiple of as many rows, or "
            f"`rows` of shape [B]; got a batch of {batch} and rows "
            f"{None if rows is None else list(rows.shape)}."
        )


def check_tail(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
    """Raise `ShapeError` unless tail and mask fit.

    Args:
        query: [B, H, Tq, d].
        keys: [B, G, S, d].
        values: [B, G, S, d].
        mask: [B or 1, 1, Tq, S], or None.
    """
    batch, heads, tokens, dim = query.shape
    if (
        (keys.shape[0], keys.shape[3]) != (batch, dim)
        or keys.shape != values.shape
        or heads % keys.shape[1]
        or keys.dtype != query.dtype
        or values.dtype != query.dtype
    ):
        raise ShapeError(
            f"For queries {list(query.shape)} in {query.dtype} the tail is keys and values "
            f"[{batch}, G, S, {dim}] of the same dtype, G a divisor of {heads}; got "
            f"{list(keys.shape)} in {keys.dtype} and {list(values.shape)} in {values.dtype}."
        )
    if mask is not None and (
        mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1:] != (1, tokens, keys.shape[2])
    ):
        raise ShapeError(
            f"The tail's mask is [{batch}, 1, {tokens}, {keys.shape[2]}]; got {list(mask.shape)}."
        )
