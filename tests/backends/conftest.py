"""Fixtures for tests of the numba backend."""

import pytest

from gracekv.backends import Sdpa, split_kv


@pytest.fixture
def short_splits(monkeypatch):
    """Let small heads have many splits, too."""
    monkeypatch.setattr(split_kv, "_ENTRIES", 7)


@pytest.fixture
def no_detour(monkeypatch):
    """Let steps fail that would be passed to sdpa."""
    monkeypatch.setattr(Sdpa, "__call__", lambda *_, **__: pytest.fail("went to sdpa"))
