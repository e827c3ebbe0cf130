"""A block's queries on GPUs, interpreted, against torch."""

from dataclasses import replace

import pytest
import torch

from gracekv.kernels.rope import Rope
from gracekv.prefill import PromptSpans, Region
from gracekv.prefill.observer import TokenRun
from gracekv.value import block_replay
from gracekv.value.block_replay import BlockReplaySums


@pytest.mark.parametrize(("count", "dim", "near", "past", "dtype", "interleaved"), [
    (130, (16, 16), 5, 0, torch.float32, False), (70, (20, 8), 64, 9, torch.bfloat16, True),
    (1, (80, 64), 1, 0, torch.float16, False), (200, (16, 16), 300, 9, torch.bfloat16, False),
])  # fmt: skip
def test_sums_equal_those_of_torch(count, dim, near, past, dtype, interleaved):
    made, (dim, rotary), end = torch.Generator().manual_seed(count), dim, count + 9
    queries = torch.randn(6, end, dim, generator=made).to(dtype)
    keys = torch.randn(2, end, dim + 8, generator=made).to(dtype)[..., :dim]
    rope = replace(Rope.of_theta(end, rotary), interleaved=interleaved)
    run, sums = TokenRun(0, queries, keys, keys, rope, 0.3), BlockReplaySums(count, 1.0, near)
    spans, totals = PromptSpans(9, end, end, end, past), torch.zeros(2, 2, end)
    for total, reads in zip(totals, (False, True), strict=True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(block_replay, "_reads", lambda *_, reads=reads: reads)
            sums.add_block(total, queries[:, 9:], Region(9, end), run, spans)
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-6)
