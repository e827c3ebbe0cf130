"""How many tokens a prefill reads at once, and prompts that do not fit on a GPU."""

import pytest

from gracekv import CaptureOptions
from gracekv.errors import CaptureMemoryError
from gracekv.hf.capture import chunk_size
from gracekv.prefill.needs import CaptureSizes
from gracekv.prefill.options import check_memory, chunk_room, is_out_of_memory


@pytest.mark.parametrize(("length", "room", "by_layers", "size"), [
    (2048, None, False, 2048), (2049, None, False, 512), (512, None, True, 512),
    (2048, None, True, 512), (2049, 5000, False, 2049), (2049, 100, False, 512),
    (4096, 5000, True, 4096), (6000, 5000, True, 5000), (6000, 100, True, 512),
    (16384, 10**9, True, 16384), (20000, 10**9, True, 16384),
])  # fmt: skip
def test_long_prompts_run_in_chunks_on_gpus_as_their_memory_allows(length, room, by_layers, size):
    kind = {"room": room, "by_layers": by_layers}
    assert chunk_size(CaptureOptions(), length, splits=True, **kind) == size
    assert chunk_size(CaptureOptions(), length, splits=False, **kind) == length
    assert chunk_size(CaptureOptions(chunk=300), length, splits=True, **kind) == 300


def test_half_of_what_is_left_of_a_gpu_holds_a_chunk():
    sizes = CaptureSizes(kv=1000, queries=10, at_once=0.5, stream=100, activations=50)
    assert chunk_room(1000, 20, sizes, free=600_200 + 100_000) == 1000
    assert chunk_room(1000, 20, sizes, free=600_000) == 0


def test_what_cannot_fit_is_refused_with_what_would():
    sizes = CaptureSizes(kv=2**20, queries=2**10, activations=2**20)
    check_memory(1000, 512, 20, sizes, free=1513 * 2**20)
    with pytest.raises(
        CaptureMemoryError,
        match=r"1000 tokens needs more memory than is free.*chunk=128 and memory_limit=0.*"
        r"1,400 MiB are free, which is enough for this prompt",
    ):
        check_memory(1000, 512, 20, sizes, free=1400 * 2**20)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    with pytest.raises(CaptureMemoryError, match=r"enough for a prompt of about 400 tokens"):
        check_memory(1000, 128, 20, sizes, free=500 * 2**20)
