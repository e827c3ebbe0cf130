"""Parts shared by compiled kernels: pointers, counters, prefetching, rows in half precision."""

from __future__ import annotations

import functools
import hashlib
import inspect
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
# A float16's exponent and mantissa bits in a float32 give a number 2^112 times too small.
_HALF_SCALE = np.float32(2.0**112)

NUMBERS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
"""The numba type of rows of each dtype; numba has no half precision (see `as_float32`)."""

# Without the wrappers for calls from Python, which take a fifth of the compile time. Initialise
# variables with np.int64(0), not 0: numba would also compile their callees for the literal 0.
inner: Callable[..., Callable[[Any], Any]] = functools.partial(
    njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Decorator for functions called only by compiled code; takes options of `numba.njit`."""


def emitted(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for functions that emit the LLVM instructions of a compiled function.

    Such a function takes numba's context and builder, the argument types and then their values, and
    returns the result's value, or None if the compiled function returns nothing.

    Args:
        result: numba type of the result.
        given: numba type of each argument, to which it is converted; None keeps its own.
    """
    places = range(len(given) + 1)  # the first one is numba's typing context
    names = [inspect.Parameter(f"x{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in places]

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(context: Any, *own: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                value = emit(context, builder, signature.args, *arguments)
                return context.get_dummy_value() if value is None else value

            kinds = (y if x is None else x for x, y in zip(given, own, strict=True))
            return result(*kinds), generate

        typed.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


@emitted(types.voidptr, types.int64)
def pointer(context: Any, builder: Any, kinds: Any, address: Any) -> Any:
    """An address as a pointer."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@emitted(types.void)
def wide_vectors(context: Any, builder: Any, kinds: Any) -> None:
    """Let loops of the calling function use 512-bit vectors, if the processor has them.

    LLVM prefers 256 bits on Intel processors, since a few wide vectors would only lower the clock.
    """
    # The set's own `add` rejects this attribute, which llvmlite does not list.
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')


@emitted(types.int64, types.voidptr, types.int64)
def fetch_and_add(context: Any, builder: Any, kinds: Any, pointer: Any, index: Any) -> Any:
    """Add 1 to pointer[index] atomically; returns its previous value."""
    word = ir.IntType(64)
    at = builder.gep(builder.bitcast(pointer, word.as_pointer()), [index])
    return builder.atomic_rmw("add", at, ir.Constant(word, 1), "acq_rel")


@emitted(types.void, None, types.int64)
def _prefetch_line(context: Any, builder: Any, kinds: Any, array: Any, offset: Any) -> None:
    """Prefetch the cache line of a byte of a contiguous array; it may be out of bounds."""
    data = context.make_array(kinds[0])(context, builder, array).data
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    at = builder.gep(builder.bitcast(data, byte), [offset])
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    )
    # For reading; into the nearest cache; data.
    builder.call(prefetch, [at, flag(0), flag(3), flag(1)])


@inner()
def prefetch(rows: Any, first: int, count: int) -> None:
    """Prefetch the cache lines of some rows of a contiguous array; they may be out of bounds."""
    width = rows.shape[1] * rows.itemsize
    for offset in range(first * width, (first + count) * width, _LINE):
        _prefetch_line(rows, offset)


def as_float32(rows: Any, first: int, count: int, wide: Any) -> Any:
    """`count` rows from `first` as float32: the array that holds them, and the first one's index.

    numba has no half-precision numbers: rows of uint16 are bfloat16, rows of int16 are float16.
    They are converted exactly into `wide` [count or more, d] float32; float32 rows are not copied.
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
    """A digest of other modules compiled into a kernel, in any order.

    numba's cache only detects changes in the file of the compiled function and in the values that
    it closes over, so a kernel closes over this digest. It is empty in an archive, whose date numba
    compares instead.
    """
    files = sorted(Path(module.__file__ or "") for module in modules)
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except OSError:
        return ""
