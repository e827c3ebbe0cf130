"""Seconds by name; a GPU's last event is waited for once, when they are read."""

import pytest
import torch

from gracekv.prefill.observations import Clock

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Event:
    """A CUDA event on a stream that takes a second between events."""

    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        Event.recorded += 1
        self.at = Event.recorded

    def elapsed_time(self, other):
        return 1000.0 * (other.at - self.at)


def test_adds_up_by_name_and_leaves_out_what_failed():
    clock = Clock()
    for _ in range(2):
        with clock.time("score", CPU):
            pass
    first = clock.seconds()
    with pytest.raises(ZeroDivisionError), clock.time("fit", CPU):
        1 / 0  # noqa: B018
    with clock.time("score", CPU):
        pass
    assert list(clock.seconds()) == ["score"]
    assert clock.seconds()["score"] > first["score"] > 0


def test_waits_for_a_gpu_once_when_the_seconds_are_read(monkeypatch):
    clock, waits = Clock(), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "synchronize", lambda self: waits.append(self.at), raising=False)
    with clock.time("prefill", GPU):
        for _ in range(2):
            with clock.time("score", GPU):
                pass
    assert waits == []
    for _ in range(2):
        assert clock.seconds() == {"prefill": 5.0, "score": 2.0}
        assert waits == [6]  # the last event
