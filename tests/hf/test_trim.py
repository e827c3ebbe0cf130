"""Freed memory goes back to the system."""

import pytest

pytest.importorskip("transformers")

from gracekv.prefill import capture_memory


def test_trimming_says_whether_it_could(monkeypatch):
    called = []
    monkeypatch.setattr(capture_memory, "_malloc_trim", lambda: called.append)
    assert capture_memory.trim_memory()
    assert called == [0]
    monkeypatch.setattr(capture_memory, "_malloc_trim", lambda: None)
    assert not capture_memory.trim_memory()
