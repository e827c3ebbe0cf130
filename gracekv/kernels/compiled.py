"""Compiles kernels for CPUs, and keeps them on disk where it can be written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any


def cached(compiler: Callable[..., Any], function: Callable[..., None]) -> Any:
    """`function`, compiled by numba's `compiler` and kept on disk for other processes.

    Where neither the package's folder nor a cache folder can be written, it is compiled anew in
    each process, and a `UserWarning` says so once.
    """
    try:
        return compiler(cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    _warn()
    return compiler(cache=False)(function)


@cache
def _warn() -> None:
    warnings.warn(
        "numba finds no folder to keep compiled kernels in, so each process compiles them, which "
        "takes seconds. Set NUMBA_CACHE_DIR to a folder that can be written.",
        stacklevel=2,
    )
