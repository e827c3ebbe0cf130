"""How many tokens a prefill runs at once."""

import pytest

from gracekv import CaptureOptions


@pytest.mark.parametrize(
    ("length", "on_gpu", "by_layers", "size"),
    [
        (2048, False, False, 2048),
        (2049, False, False, 512),
        (2049, True, False, 2049),
        (4097, True, False, 4096),
        (512, False, True, 512),
        (2048, False, True, 512),
        (4096, True, True, 4096),
        (4097, True, True, 4096),
    ],
)
def test_long_prompts_run_in_chunks_larger_ones_on_gpus(length, on_gpu, by_layers, size):
    kind = {"on_gpu": on_gpu, "by_layers": by_layers}
    assert CaptureOptions().chunk_of(length, splits=True, **kind) == size
    assert CaptureOptions().chunk_of(length, splits=False, **kind) == length
    assert CaptureOptions(chunk=300).chunk_of(length, splits=True, **kind) == 300
