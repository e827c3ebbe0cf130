"""Running log-sum-exp of rows in one pass, compiled for CPUs.

A row is read in blocks that stay in the processor's nearest cache: a block's maximum, then its sum.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import intrinsics, numba_softmax, row_vectors
from gracekv.kernels.intrinsics import digest, fetch_and_add, pointer
from gracekv.kernels.numba_softmax import exponentiate, largest

# Numbers of a block, and rows that a thread takes at a time.
_BLOCK = 1024
_ROWS = 8


class LogSumExpArgs(ctypes.Structure):
    """Arguments of the kernel: addresses of contiguous arrays, and sizes.

    Fields:
        x: float32 [rows, columns]; overwritten.
        top: float32 [rows], the largest number of each row so far.
        total: float64 [rows], the sum of e^(x - top) so far.
        counter: int64, 0.
    """

    _fields_ = [
        (name, ctypes.c_int64) for name in ("x", "top", "total", "counter", "rows", "columns")
    ]  # fmt: skip


_ARGS = np.dtype(LogSumExpArgs)


@njit(nogil=True, fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _sum(x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _row(x: Any, top: Any, total: Any, bits: Any, power: Any) -> Any:
    """`top` and `total` of one row with x [columns] added.

    As in torch, the total is NaN once a number is NaN or infinite.
    """
    for first in range(0, len(x), _BLOCK):
        block = x[first : first + _BLOCK]
        peak = max(top, largest(block, len(block)))
        # Where all numbers so far are -inf, differences would be NaN.
        if peak != -np.inf:
            total *= math.exp(np.float64(top) - np.float64(peak))
            for i in range(len(block)):
                block[i] -= peak
            exponentiate(block, bits[: len(block)], power[: len(block)])
            total += _sum(block)
            top = peak
    return top, total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _run_rows(args: Any) -> None:
    """Take rows from the shared counter until there are none left."""
    shape = (args.rows, args.columns)
    x = carray(pointer(args.x), shape, np.float32)
    top = carray(pointer(args.top), (args.rows,), np.float32)
    total = carray(pointer(args.total), (args.rows,), np.float64)
    bits = np.empty(_BLOCK, np.int32)
    power = bits.view(np.float32)
    counter = pointer(args.counter)
    while True:
        start = fetch_and_add(counter, 0) * _ROWS
        if start >= args.rows:
            return
        for r in range(start, min(start + _ROWS, args.rows)):
            top[r], total[r] = _row(x[r], top[r], total[r], bits, power)


@functools.cache
def accumulate() -> Any:
    """The kernel: a C callback that takes `LogSumExpArgs` by address.

    The first call on a machine compiles for some seconds; later ones load the result from disk.
    """
    sources = digest(intrinsics, numba_softmax, row_vectors)

    def kernel(address: Any) -> None:
        _ = sources
        _run_rows(carray(address, (1,), _ARGS)[0])

    return cfunc(types.void(types.voidptr), cache=True)(kernel)
