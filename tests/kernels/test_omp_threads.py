"""Work on many threads: torch's if available, else our own."""

import ctypes

import pytest

numba = pytest.importorskip("numba")

from gracekv.kernels import compiled  # noqa: E402
from gracekv.kernels.intrinsics import fetch_and_add, pointer  # noqa: E402


@numba.cfunc(numba.types.void(numba.types.int64))
def add_one(address):
    fetch_and_add(pointer(address), 0)


@pytest.mark.parametrize("shared", [True, False])
def test_every_thread_is_called_once(shared, threads, monkeypatch):
    threads(3)
    if not shared:
        monkeypatch.setattr(compiled, "_parallel", lambda: None)
    elif compiled.threads_obstacle() is not None:
        pytest.skip("this build of torch has no OpenMP threads that can be shared")
    count = ctypes.c_int64(0)
    compiled.on_all_threads(add_one, ctypes.addressof(count))
    assert count.value == 3
