"""Sizes of the kernel's tiles: a static table by head dimension, dtype and GPU.

Nothing is tuned at run time, so a model decodes in the same way on equal machines. A test compiles
each entry for its GPUs and checks that almost nothing spills and that shared memory suffices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gracekv.errors import BackendUnavailableError

# Head dimensions are padded to a power of two; a matrix product needs at least 16.
_SMALLEST, _LARGEST = 16, 256

# Compute capabilities whose blocks may use at least 163 KB of shared memory; others have 99 KB.
_ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}


@dataclass(frozen=True, slots=True)
class Tiles:
    """One kernel configuration.

    Attributes:
        queries: rows in a query tile, query heads times new tokens.
        keys: entries read in one step.
        warps: warps per program.
        stages: stages of the software pipeline that loads ahead.
        precision: how float32 matrices are multiplied: "tf32x3", three tf32 products of split
            operands, or "ieee", plain multiplications; both have float32 precision.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    precision: str


# (padded head dimension, bytes per element) -> (query rows, keys, warps) by ascending query rows;
# the sizes for which registers suffice in compiled code (ours). Not 64 rows of float32: on an H100,
# the matrix instructions that Triton 3.6 then uses read beyond shared memory.
_TABLE = {
    (16, 2): ((16, 128, 4), (32, 128, 4), (64, 64, 8)),
    (32, 2): ((16, 128, 4), (32, 128, 4), (64, 64, 8)),
    (64, 2): ((16, 64, 4), (32, 64, 4), (64, 64, 8)),
    (128, 2): ((16, 64, 4), (32, 32, 4), (64, 64, 8)),
    (256, 2): ((16, 32, 4), (32, 32, 4), (64, 32, 8)),
    (16, 4): ((16, 32, 4), (32, 16, 4)),
    (32, 4): ((16, 32, 4), (32, 16, 4)),
    (64, 4): ((16, 32, 4), (32, 16, 4)),
    (128, 4): ((16, 32, 4), (32, 32, 8)),
    (256, 4): ((16, 16, 4),),
}

# Pipeline stages: two buffers in flight if two such programs fit in a processor's memory, else one.
_STAGES = {True: 3, False: 2}

# From this head dimension on, the split operands of tf32x3 do not fit in registers.
_PLAIN_FROM = 256


def padded_dim(dim: int) -> int:
    """The power of two that a head of dimension `dim` is padded to.

    Raises `BackendUnavailableError` above 256.
    """
    if dim > _LARGEST:
        raise BackendUnavailableError(
            f"The triton backend reads heads of dimension {_LARGEST} or less; got {dim}. Use "
            f"backend 'sdpa'."
        )
    return max(_SMALLEST, 1 << (dim - 1).bit_length())


def merge_step(block_d: int) -> int:
    """Splits that a merging program reads at once: 2,048 numbers in rows of `block_d`."""
    return max(8, 2048 // block_d)


def tiles(dim: int, dtype: torch.dtype, capability: tuple[int, int], queries: int = 1) -> Tiles:
    """The configuration for heads of dimension `dim` on GPUs of a compute capability.

    Args:
        dim: d.
        dtype: dtype of queries, keys and values.
        capability: (major, minor).
        queries: rows that share a KV head; the tile is the smallest that holds them, or the
            largest.

    Raises `BackendUnavailableError` for a dtype or dimension that the kernel does not support.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise BackendUnavailableError(
            f"Triton reads float32, float16 and bfloat16; got {dtype}. Use backend 'sdpa'."
        )
    choices = _TABLE[padded_dim(dim), dtype.itemsize]
    chosen = next((choice for choice in choices if queries <= choice[0]), choices[-1])
    plain = dtype != torch.float32 or padded_dim(dim) >= _PLAIN_FROM
    return Tiles(*chosen, _STAGES[capability in _ROOMY], "ieee" if plain else "tf32x3")
