"""Freed memory goes back to the system."""

import pytest

pytest.importorskip("transformers")

from gracekv.hf import trim


def test_trimming_says_whether_it_could(monkeypatch):
    called = []
    monkeypatch.setattr(trim, "_malloc_trim", lambda: called.append)
    assert trim.trim_memory()
    assert called == [0]
    monkeypatch.setattr(trim, "_malloc_trim", lambda: None)
    assert not trim.trim_memory()
