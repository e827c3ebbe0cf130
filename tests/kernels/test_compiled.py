"""Compiled kernels: cached on disk, called with checked addresses, run on torch's threads."""

from functools import partial

import pytest
import torch

from gracekv.errors import ShapeError
from gracekv.kernels import compiled
from gracekv.kernels.addresses import address
from support.devices import two_devices

numba = pytest.importorskip("numba")
from numba.core import caching  # noqa: E402

from gracekv.kernels.numba_softmax import exponentials  # noqa: E402


def one():
    return 1


@pytest.mark.filterwarnings("error")
def test_without_a_folder_kernels_are_compiled_uncached(monkeypatch):
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    compiled._warn.cache_clear()
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        assert compiled.cached(partial(numba.njit, nogil=True), one)() == 1
    # Warned once.
    compiled.cached(partial(numba.cfunc, numba.types.int64()), one)


def test_a_file_of_the_cache_that_was_cut_short_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiler = partial(numba.njit, numba.int64())
    for kind in ("*.nbi", "*.nbc", "*.nbi"):
        compiled.cached(compiler, one)
        (file,) = tmp_path.rglob(kind)
        file.write_bytes(file.read_bytes()[:-9])
        assert compiled.cached(compiler, one)() == 1


def test_a_tensor_that_fits_gives_its_address():
    tensor = torch.zeros(2, 3)
    assert address("keys", tensor, torch.float32, 2, 3) == tensor.data_ptr()


OTHERS = [torch.zeros(2, 3).bfloat16(), torch.zeros(2, 2), torch.zeros(6), torch.zeros(3, 2).T]


@pytest.mark.parametrize("tensor", OTHERS)
def test_others_are_refused_by_name(tensor):
    with pytest.raises(ShapeError, match=r"takes 'keys' as a contiguous tensor \[2, 3\] of torch"):
        address("keys", tensor, torch.float32, 2, 3)


def test_so_is_one_on_another_device():
    with two_devices() as there, pytest.raises(ShapeError, match="on cpu; got"):
        address("keys", torch.zeros(2, 3).to(there), torch.float32, 2, 3)


def test_loops_of_a_softmax_use_512_bits_where_there_are_any():
    single = numba.float32
    arguments = (single[::1], numba.int64, single, single)
    exponentials.compile(arguments)
    assert '"prefer-vector-width"="512"' in exponentials.inspect_llvm(arguments)
