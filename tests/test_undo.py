"""A block's changes are undone, whenever an interrupt comes."""

import threading

import pytest
import torch

from gracekv.undo import full_float32, undone
from support.interrupts import executed_lines, interrupted


def test_set_back_after_the_block_even_if_it_fails():
    calls = []
    with undone(lambda: calls.append(1)):
        assert not calls
    assert calls
    calls.clear()
    with pytest.raises(ZeroDivisionError), undone(lambda: calls.append(1)):
        _ = 1 / 0
    assert calls


def test_a_call_that_was_interrupted_is_made_again():
    state = {"a": 1, "b": 1}

    def undo():
        state["a"] = 0
        if state["b"] == 1:
            state["b"] = 2
            raise KeyboardInterrupt
        state["b"] = 0

    with pytest.raises(KeyboardInterrupt), undone(undo):
        pass
    assert state == {"a": 0, "b": 0}


def returned(action, *args):
    """The action's return value in a separate thread; None if it does not end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(action(*args)), daemon=True)
    thread.start()
    thread.join(30)
    return found[0] if found else None


def test_an_interrupt_at_any_line_leaves_the_setting_to_other_threads(precision):
    def change():
        with full_float32():
            return True

    precision("high")
    for place, count in sorted(executed_lines(change).items()):
        for occurrence in range(1, count + 1):
            assert returned(interrupted, change, place, occurrence), (place, occurrence)
            assert torch.get_float32_matmul_precision() == "high", (place, occurrence)
            assert returned(change), (place, occurrence)
