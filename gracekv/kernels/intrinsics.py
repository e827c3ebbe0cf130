"""Parts that compiled kernels share: pointers, counters, prefetching, rows in half precision."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import njit, types  # type: ignore[import-untyped,unused-ignore]
from numba.extending import intrinsic, overload  # type: ignore[import-untyped,unused-ignore]

_LINE = 64
# A float16's exponent and mantissa bits in a float32 are a number 2^112 times too small.
_HALF_SCALE = np.float32(2.0**112)

NUMBERS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
"""The numba type of rows of each dtype; numba has no half precision (see `as_float32`)."""

# Without the wrappers for calls from Python, which take a fifth of the time to compile. Start
# variables with np.int64(0), not 0: numba would also compile the functions they go to for 0.
inner: Callable[..., Callable[[Any], Any]] = functools.partial(
    njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Decorator of a function that compiled code alone calls, with options of `numba.njit`."""


@intrinsic  # type: ignore[untyped-decorator]
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def wide_vectors(context: Any) -> Any:
    """Let loops of the function that calls this use vectors of 512 bits, where there are any.

    LLVM takes 256 bits on Intel's processors, since a few wide vectors lower the clock for nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # The set's own `add` refuses this attribute, which llvmlite does not list.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch_and_add(context: Any, pointer: Any, index: Any) -> Any:
    """Add 1 to pointer[index] atomically; returns its previous value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        at = builder.gep(builder.bitcast(arguments[0], word.as_pointer()), [arguments[1]])
        return builder.atomic_rmw("add", at, ir.Constant(word, 1), "acq_rel")

    return types.int64(types.voidptr, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch_line(context: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line of a byte of a contiguous array; it may lie outside."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        at = builder.gep(builder.bitcast(array.data, byte), [arguments[1]])
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        )
        # For reading; into the nearest cache; data.
        builder.call(prefetch, [at, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@inner()
def prefetch(rows: Any, first: int, count: int) -> None:
    """Prefetch the cache lines of some rows of a contiguous array; they may lie outside."""
    width = rows.shape[1] * rows.itemsize
    for offset in range(first * width, (first + count) * width, _LINE):
        _prefetch_line(rows, offset)


def as_float32(rows: Any, first: int, count: int, wide: Any) -> Any:
    """`count` rows from `first` as float32: the array that holds them, and the first one's index.

    numba has no half-precision numbers: rows of uint16 are bfloat16, rows of int16 float16. They
    are converted exactly into `wide` [count or more, d] float32; float32 rows stay where they are.
    """
    raise NotImplementedError("Only compiled code can call this; see `_typed`.")


@overload(as_float32)  # type: ignore[untyped-decorator]
def _typed(rows: Any, first: Any, count: Any, wide: Any) -> Any:
    def same(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        return rows, first

    def bfloat16(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        bits = wide.view(np.uint32)
        for e in range(count):
            for i in range(rows.shape[1]):
                bits[e, i] = np.uint32(rows[first + e, i]) << np.uint32(16)
        return wide, 0

    def float16(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        bits = wide.view(np.uint32)
        for e in range(count):
            for i in range(rows.shape[1]):
                bits[e, i] = (np.uint32(rows[first + e, i]) & np.uint32(0x7FFF)) << np.uint32(13)
            for i in range(rows.shape[1]):
                wide[e, i] *= _HALF_SCALE
            for i in range(rows.shape[1]):
                x = np.uint32(rows[first + e, i])
                infinite = (x & np.uint32(0x7C00)) == np.uint32(0x7C00)
                sign = (x & np.uint32(0x8000)) << np.uint32(16)
                bits[e, i] |= sign | (np.uint32(0x7F800000) if infinite else np.uint32(0))
        return wide, 0

    return {types.float32: same, types.uint16: bfloat16, types.int16: float16}[rows.dtype]


def digest(*modules: ModuleType) -> str:
    """A digest of the modules that are compiled into a kernel beside its own file, in any order.

    numba's cache only detects changes in the file of the compiled function and in the values that
    it closes over, so a kernel closes over this digest.
    """
    files = sorted(Path(module.__file__ or "") for module in modules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
