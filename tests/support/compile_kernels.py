"""Compile the CPU kernels before tests do: python tests/support/compile_kernels.py [PACKAGE ...]

Compiles the kernels of all packages of gracekv or of some, each once, two at a time; otherwise test
processes that reach a kernel at the same time would each compile it. Tests find them in numba's
cache (NUMBA_CACHE_DIR, or next to the sources).
"""

import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def kernels(rooms):
    """Functions that return a compiled kernel, and the dtypes that they take; slowest first."""
    from gracekv.backends.numba_kernel import attend
    from gracekv.kernels.intrinsics import NUMBERS
    from gracekv.kernels.softmax_sums_numba import pack_keys, reduce_columns
    from gracekv.tree.engines.numba_kernel import distortion_kernel
    from gracekv.vllm.numba_kernel import work_kernel

    without_dtypes = distortion_kernel, reduce_columns
    every = attend, distortion_kernel, work_kernel, reduce_columns, pack_keys
    return [
        (kernel, () if kernel in without_dtypes else NUMBERS)
        for kernel in every
        if not rooms or kernel.__module__.split(".")[1] in rooms
    ]


def compile_all(number):
    """Compile a kernel for all its dtypes in one process, since they share an index on disk."""
    kernel, dtypes = kernels(sys.argv[1:])[number]
    for arguments in [(dtype,) for dtype in dtypes] or [()]:
        kernel(*arguments)


if __name__ == "__main__" and importlib.util.find_spec("numba"):
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(compile_all, range(len(kernels(sys.argv[1:])))))
