"""`buy_paths` of arrays, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.allocate import paths
from gracekv.kernels.compiled import cached

buy_paths: Callable[..., None] = cached(partial(njit, nogil=True), paths.buy_paths)
"""As `gracekv.allocate.paths.buy_paths`."""
