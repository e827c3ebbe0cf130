"""Compiled kernels for CPUs: cached on disk and run on torch's threads.

A second pool of threads would compete with torch's, whose idle threads spin: while one pool uses
all cores, the other one waits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import torch


def cached(compiler: Callable[..., Any], function: Callable[..., None]) -> Any:
    """`function`, compiled by numba's `compiler` and cached on disk for other processes.

    If neither the package's folder nor a cache folder is writable, it is compiled in each process,
    and a `UserWarning` is issued once.
    """
    try:
        try:
            return compiler(cache=True)(function)
        except (EOFError, pickle.UnpicklingError):
            # A crash or a full disk cut a file of the cache short.
            importlib.import_module("numba.core.caching").FunctionCache(function).flush()
            return compiler(cache=True)(function)
    except (RuntimeError, OSError) as error:  # OSError: the folder is full
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
    _warn()
    return compiler(cache=False)(function)


def argument_fields(integers: str, floats: str = "") -> list[tuple[str, type]]:
    """The fields of a `ctypes.Structure` of 8-byte numbers, named in texts separated by spaces.

    Addresses are integers.
    """
    kinds = ((integers, ctypes.c_int64), (floats, ctypes.c_double))
    return [(name, kind) for names, kind in kinds for name in names.split()]


def numba_obstacle() -> str | None:
    """The reason why numba cannot compile kernels here, with a remedy; None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed. Run: pip install 'gracekv[cpu]'"
    try:
        numba = importlib.import_module("numba")
    except (ImportError, OSError) as error:  # for example, an unsupported NumPy
        warnings.warn(f"numba cannot be imported ({error}): using slower torch code.", stacklevel=1)
        return f"numba cannot be imported: {error} Reinstall gracekv[cpu]"
    return "NUMBA_DISABLE_JIT is set. Unset it" if numba.config.DISABLE_JIT else None


@cache
def _warn() -> None:
    warnings.warn(
        "numba finds no writable cache folder, so each process compiles its kernels, which "
        "takes seconds. Set NUMBA_CACHE_DIR to a writable folder.",
        stacklevel=2,
    )


@cache
def _parallel() -> Any:
    """The OpenMP function of torch's own library that starts a parallel region, or None."""
    entry = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    if entry is not None:
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
    return entry


def limit_threads(count: int) -> None:
    """Set the number of torch's threads for the calling thread; other threads are not affected.

    Does nothing without OpenMP (see `threads_obstacle`). torch sets the number itself when a thread
    first queries it, so query it before.
    """
    if (limit := getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)) is not None:
        limit(count)


def threads_obstacle() -> str | None:
    """The reason why torch's threads cannot be used; None if they can or there is only one."""
    if torch.get_num_threads() == 1 or _parallel() is not None:
        return None
    return (
        "This build of torch has no OpenMP threads that can be shared (builds for Linux and macOS "
        "have). Call torch.set_num_threads(1), or use backend 'sdpa'."
    )


def on_all_threads(function: Any, argument: int) -> None:
    """Call function(argument) on all of torch's threads and wait for them.

    Always on all of them: OpenMP ends threads that a smaller team does not use, and torch's next
    operation would have to start them again. If they are not available (see `threads_obstacle`), as
    many threads of our own are used.

    Args:
        function: a C callback of numba, void (void*).
        argument: an address.
    """
    threads = torch.get_num_threads()
    if (parallel := _parallel()) is not None:
        parallel(function.address, argument, threads, 0)
    else:
        # ctypes releases Python's lock during the call.
        list(_pool(os.getpid(), threads).map(function.ctypes, [argument] * threads))


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """This process's thread pool; a forked process cannot use its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="gracekv")
