"""Freed memory goes back to the system."""

import pytest

pytest.importorskip("transformers")

from gracekv.hf import base_result


def test_trimming_says_whether_it_could(monkeypatch):
    called = []
    monkeypatch.setattr(base_result, "_malloc_trim", lambda: called.append)
    assert base_result.trim_memory()
    assert called == [0]
    monkeypatch.setattr(base_result, "_malloc_trim", lambda: None)
    assert not base_result.trim_memory()
