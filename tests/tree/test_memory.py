"""The default limit of working memory."""

import pytest
import torch

from gracekv.tree.tree_batch import scratch_bytes


def test_a_cpu_gets_what_its_cache_bears() -> None:
    assert scratch_bytes(torch.device("cpu")) == 3 * 2**24


@pytest.mark.parametrize(
    ("free", "unused", "want"),
    [
        (2**40, 0, 2**30),
        (2**32, 0, 2**29),
        (2**20, 0, 3 * 2**24),
        # What torch's allocator has reserved and does not use is free to us.
        (0, 2**32, 2**29),
        (2**31, 2**31, 2**29),
    ],
    ids=["much", "some", "none", "reserved", "both"],
)
def test_a_gpu_gives_an_eighth_of_what_is_free(
    free: int, unused: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = 2**33
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: used)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: used + unused)
    assert scratch_bytes(torch.device("cuda", 0)) == want
