"""Kernels run where nothing can be written, and say once that they are compiled anew."""

import warnings
from functools import partial

import pytest

from gracekv.kernels import compiled

numba = pytest.importorskip("numba")
from numba.core import caching  # noqa: E402


def one():
    return 1


def test_without_a_folder_kernels_are_compiled_uncached(monkeypatch):
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    compiled._warn.cache_clear()
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        assert compiled.cached(partial(numba.njit, nogil=True), one)() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.cached(partial(numba.cfunc, numba.types.int64()), one)
