"""Work on many threads: torch's where they can be had, else our own."""

import ctypes

import pytest
import torch

numba = pytest.importorskip("numba")

from gracekv.kernels import compiled  # noqa: E402
from gracekv.kernels.intrinsics import fetch_and_add, pointer  # noqa: E402


@numba.cfunc(numba.types.void(numba.types.int64))
def add_one(address):
    fetch_and_add(pointer(address), 0)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shared", [True, False])
def test_every_thread_is_called_once(shared, three_threads, monkeypatch):
    if not shared:
        monkeypatch.setattr(compiled, "_parallel", lambda: None)
    elif compiled.threads_obstacle() is not None:
        pytest.skip("this build of torch has no OpenMP threads that can be shared")
    count = ctypes.c_int64(0)
    compiled.on_all_threads(add_one, ctypes.addressof(count))
    assert count.value == 3
