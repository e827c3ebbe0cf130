"""Tiles of small matrix products: right at every size, and bitwise the same in every tile."""

import functools
import importlib.util

import numpy as np
import pytest
from hypothesis import given

from support.draws import SEEDS, ints

numba = pytest.importorskip("numba")

from gracekv.kernels import matmul  # noqa: E402

COLUMNS = matmul.COLUMNS


@functools.cache
def product_of(wide):
    """A function that multiplies arrays, for this machine or for one with narrow registers."""
    multiply = (matmul if wide else narrow()).multiply

    @numba.njit
    def product(a, b, c, first, stop):
        multiply(
            a.ctypes.data, a.shape[1], a.shape[0], b.ctypes.data, b.shape[1], c.ctypes.data,
            c.shape[1], first, stop, c.shape[1],
        )  # fmt: skip

    return product


def narrow():
    spec = importlib.util.spec_from_file_location("narrow_matmul", matmul.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba.core.codegen.get_host_cpu_features", lambda: "")
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wide", [True, False])
@given(seed=SEEDS, rows=ints(1, 11), columns=ints(1, 9), first=ints(0, 5), summed=ints(0, 40))
def test_it_is_the_product(wide, seed, rows, columns, first, summed):
    product, rng = product_of(wide), np.random.default_rng(seed)
    stop = first + summed
    # Elements outside the summed part must not be read.
    a = np.full((rows, stop + 2), np.nan, np.float32)
    b = np.full((stop + 1, COLUMNS * columns + 3), np.nan, np.float32)
    a[:, first:stop] = rng.standard_normal((rows, summed))
    b[first:stop, : COLUMNS * columns] = rng.standard_normal((summed, COLUMNS * columns))
    found = np.full((rows, COLUMNS * columns), np.nan, np.float32)
    product(a, b, found, first, stop)
    want = a[:, first:stop].astype(np.float64) @ b[first:stop, : COLUMNS * columns]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    # A single row and a single column block have the same chain of sums.
    one = np.empty_like(found[:1])
    product(a[-1:].copy(), b, one, first, stop)
    np.testing.assert_array_equal(one[0], found[-1])
    part = np.empty((rows, COLUMNS), np.float32)
    product(a, b[:, COLUMNS * (columns - 1) :].copy(), part, first, stop)
    np.testing.assert_array_equal(part, found[:, -COLUMNS:])
