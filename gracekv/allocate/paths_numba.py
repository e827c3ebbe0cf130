"""`buy_paths` for arrays, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from numba import njit, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.allocate import paths
from gracekv.kernels.compiled import cached

_NUMBERS = types.int64[::1]
_KIND = types.void(*(_NUMBERS,) * 4, types.int64, _NUMBERS, types.boolean[::1], _NUMBERS)
buy_paths: Callable[..., None] = cached(partial(njit, _KIND, nogil=True), paths.buy_paths)
"""As `gracekv.allocate.paths.buy_paths`."""
