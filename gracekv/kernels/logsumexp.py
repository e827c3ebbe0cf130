"""Log-sum-exp of rows that come in blocks of columns."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor

from gracekv.kernels import omp_threads


def logsumexp(blocks: Iterable[Tensor]) -> Tensor:
    """Over the columns of all blocks, float32 [rows]; NaN in rows with a NaN or infinity.

    Args:
        blocks: float32 [rows, any], contiguous, at least one; the memory of each is overwritten
            before the next is asked for.

    On CPUs with numba each block is read once, on as many threads as torch uses.
    """
    sums: tuple[Tensor, Tensor] | None = None
    for block in blocks:
        compiled = block.is_cpu and importlib.util.find_spec("numba") is not None
        if sums is None:
            top = block.new_full((len(block),), -torch.inf)
            sums = top, torch.zeros_like(top, dtype=torch.float64 if compiled else None)
        sums = _add_compiled(block, *sums) if compiled else _add(block, *sums)
    if sums is None:
        raise ValueError("logsumexp takes at least one block of columns; got none.")
    top, total = sums
    return total.log().float().add_(top)


def _add(block: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row, and the sum of exponentials below it, with a block added."""
    peak = torch.maximum(top, block.amax(dim=-1))
    total.mul_((top - peak).exp_())
    # In the block's own memory: a copy of it costs more than its sums.
    total.add_(block.sub_(peak[:, None]).exp_().sum(dim=-1))
    return peak, total


def _add_compiled(block: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    from gracekv.kernels.logsumexp_numba import LogSumExpArgs, accumulate

    counter = ctypes.c_int64(0)
    addresses = (block.data_ptr(), top.data_ptr(), total.data_ptr(), ctypes.addressof(counter))
    args = LogSumExpArgs(*addresses, *block.shape)
    omp_threads.run(accumulate(), ctypes.addressof(args))
    return top, total
