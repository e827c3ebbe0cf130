"""What tests of the numba backend share."""

import pytest
import torch

from gracekv.backends import Sdpa, split_kv


@pytest.fixture
def short_splits(monkeypatch):
    """Small heads have many splits too."""
    monkeypatch.setattr(split_kv, "_ENTRIES", 7)


@pytest.fixture
def no_detour(monkeypatch):
    """Steps that would be handed to sdpa fail."""

    def refuse(*args, **kwargs):
        raise AssertionError("went to sdpa")

    monkeypatch.setattr(Sdpa, "__call__", refuse)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
