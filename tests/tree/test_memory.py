"""The default limit of working memory."""

import pytest
import torch

from gracekv.tree.memory import scratch_bytes


def test_a_cpu_gets_what_its_cache_bears() -> None:
    assert scratch_bytes(torch.device("cpu")) == 3 * 2**24


@pytest.mark.parametrize(
    ("free", "want"),
    [(2**40, 2**30), (2**32, 2**29), (2**20, 3 * 2**24)],
    ids=["much", "some", "none"],
)
def test_a_gpu_gives_an_eighth_of_what_is_free(
    free: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 2**40))
    assert scratch_bytes(torch.device("cuda", 0)) == want
