"""How many tokens a prefill runs at once."""

import pytest

from gracekv import CaptureOptions


@pytest.mark.parametrize(
    ("length", "on_gpu", "size"),
    [(2048, False, 2048), (2049, False, 512), (2049, True, 2049), (4097, True, 4096)],
)
def test_long_prompts_run_in_chunks_larger_ones_on_gpus(length, on_gpu, size):
    assert CaptureOptions().chunk_of(length, splits=True, on_gpu=on_gpu) == size
    assert CaptureOptions().chunk_of(length, splits=False, on_gpu=on_gpu) == length
    assert CaptureOptions(chunk=300).chunk_of(length, splits=True, on_gpu=on_gpu) == 300
