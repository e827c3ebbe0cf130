"""Intrinsics at the end of a page, beyond which they must not read or write."""

import sys

import pytest

from support.fresh_python import fresh_python

pytest.importorskip("numba")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called as on Linux"),
]

SCRIPT = """
import ctypes, mmap, sys
import numpy as np
import torch
from numba import njit
from gracekv.kernels.intrinsics import NUMBERS, as_float32, fetch_and_add, pointer, prefetch

PAGE, LIBC, HELD = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True), []

def guarded(values):
    '''A copy of an array that ends where a page without any access begins.'''
    pages = -(-values.nbytes // PAGE) + 1
    memory = mmap.mmap(-1, pages * PAGE)
    HELD.append(memory)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + (pages - 1) * PAGE
    assert LIBC.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(PAGE), 0) == 0
    place = np.ndarray(values.shape, values.dtype, memory, (pages - 1) * PAGE - values.nbytes)
    place[...] = values
    return place

@njit
def converted(rows, first, count, wide, out):
    prefetch(rows, first, count + 64)
    source, start = as_float32(rows, first, count, wide)
    for e in range(count):
        for i in range(rows.shape[1]):
            out[e, i] = source[start + e, i]

@njit
def counted(address, index):
    return fetch_and_add(pointer(address), index)

beyond = int(sys.argv[1])
draw = torch.Generator().manual_seed(0)
for dtype, seen in NUMBERS.items():
    for count in (1, 2, 7):
        for dim in (1, 3, 8, 64, 80):
            rows = torch.randn(count + 2, dim, generator=draw).to(dtype)
            whole = rows.view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).numpy().view(seen)
            wide, out = (guarded(np.zeros((count, dim), np.float32)) for _ in range(2))
            converted(guarded(whole), 2 + beyond, count, wide, out)
            assert (out == rows[2:].float().numpy()).all()
counter = guarded(np.zeros(3, np.int64))
assert [counted(counter.ctypes.data, 2) for _ in range(3)] == [0, 1, 2]
assert counter.tolist() == [0, 0, 3]
"""


def run(beyond):
    # The pages alone shall notice.
    return fresh_python("-c", SCRIPT, beyond, status=None, NUMBA_BOUNDSCHECK="0").returncode


def test_intrinsics_stay_inside_their_arrays():
    assert run(0) == 0


def test_the_pages_guard():
    # One row further, the process is killed.
    assert run(1) < 0
