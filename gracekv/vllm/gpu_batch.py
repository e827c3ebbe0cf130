"""How a step's work over stored contexts is divided among the programs of a GPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gracekv.backends.triton_tiles import Tiles, padded_dim, tiles
from gracekv.kernels import device as gpu
from gracekv.vllm.context_attention import Asking
from gracekv.vllm.context_batch import ContextBatch, Division, plan_batch

# Programs that a launch aims at, by processor; more than run at once, since heads are uneven.
# Source: ours.
_PROGRAMS = 4
# The largest query tile that fits the registers beside two loops, by padded head dimension.
_LARGEST = {128: 32, 256: 16}
# Entries or tokens that are worth a program of their own. Source: ours.
_ENTRIES = 256


def plan_gpu_batch(
    asking: Mapping[int, Asking], metadata: Any, group: int, pages: Tensor
) -> ContextBatch:
    """The step's work over contexts, on the device of `pages` [blocks, G, block, 2d].

    Other args are those of `plan_batch`.
    """
    of_context: Counter[str] = Counter()
    for context, tokens in asking.values():
        of_context[context.header.digest] += tokens * group
    tile = device_tile(pages.device, pages.shape[3] // 2, pages.dtype, max(of_context.values()))
    programs = _PROGRAMS * gpu.processors(pages.device)
    return plan_batch(asking, metadata, group, pages, Division(tile.queries, _ENTRIES, programs))


@functools.cache
def device_tile(device: torch.device, dim: int, dtype: torch.dtype, rows: int) -> Tiles:
    """`unit_tile` on `device`; every layer asks."""
    return unit_tile(dim, dtype, gpu.capability(device), rows)


def unit_tile(dim: int, dtype: torch.dtype, capability: tuple[int, int], rows: int) -> Tiles:
    """The kernel's tile.

    Args:
        dim: d.
        dtype: of queries, keys and values.
        capability: of the GPU, (major, minor).
        rows: the most query rows that share a context; those of the largest unit lead to the same.

    Raises `BackendUnavailableError` for a dtype or dimension that the kernel does not read.
    """
    return tiles(dim, dtype, capability, min(rows, _LARGEST.get(padded_dim(dim), rows)))
