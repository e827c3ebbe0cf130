"""Instructions for compiled kernels: pointers, atomic counters and prefetching."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import njit, types  # type: ignore[import-untyped,unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped,unused-ignore]

_LINE = 64


@intrinsic  # type: ignore[untyped-decorator]
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


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
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        at = builder.gep(builder.bitcast(found.data, byte), [arguments[1]])
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        )
        # For reading; into the nearest cache; data.
        builder.call(prefetch, [at, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@njit(nogil=True)  # type: ignore[untyped-decorator]
def prefetch(rows: Any, first: int, count: int) -> None:
    """Prefetch the cache lines of some rows of a contiguous array; they may lie outside."""
    width = rows.shape[1] * rows.itemsize
    for offset in range(first * width, (first + count) * width, _LINE):
        _prefetch_line(rows, offset)
