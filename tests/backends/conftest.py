"""What tests of the numba backend share."""

import pytest

from gracekv.backends import Sdpa, split_kv


@pytest.fixture
def short_splits(monkeypatch):
    """Small heads have many splits too."""
    monkeypatch.setattr(split_kv, "_ENTRIES", 7)


@pytest.fixture
def no_detour(monkeypatch):
    """Steps that would be handed to sdpa fail."""
    monkeypatch.setattr(Sdpa, "__call__", lambda *_, **__: pytest.fail("went to sdpa"))
