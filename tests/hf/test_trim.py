"""Freed memory goes back to the system."""

from gracekv.prefill import capture_memory


def test_memory_goes_back_where_there_is_a_way(monkeypatch):
    called = []
    monkeypatch.setattr(capture_memory, "_malloc_trim", lambda: called.append)
    capture_memory.trim_memory()
    assert called == [0]
    monkeypatch.setattr(capture_memory, "_malloc_trim", lambda: None)
    capture_memory.trim_memory()
    assert called == [0]
