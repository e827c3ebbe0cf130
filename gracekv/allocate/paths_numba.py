"""`buy_paths` of arrays, compiled."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.allocate import paths

buy_paths: Callable[..., None] = njit(nogil=True, cache=True)(paths.buy_paths)
"""As `gracekv.allocate.paths.buy_paths`."""
