"""Which of a step's tokens a recording gets."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gracekv.vllm.context_attention import Step, current_step, set_step

# Three requests with 1, 2 and 1 tokens; the second one's pages begin with block 7.
METADATA = SimpleNamespace(
    block_table=torch.tensor([[3, 7], [7, 2], [9, 0]]), query_start_loc=torch.tensor([0, 1, 3, 4])
)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    layers = ModuleType("vllm.model_executor.models.utils")
    layers.extract_layer_index = lambda name: int(name.rpartition(".")[2])
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    yield
    set_step(None)


def recorded(add):
    recording = SimpleNamespace(add=add)
    recording.fail = lambda error: setattr(recording, "failure", error)
    set_step(Step({}, (recording, SimpleNamespace(block=7, start=40, count=2))))
    step, tokens = current_step(), torch.arange(4.0).view(4, 1, 1)
    step.record("layers.5", (tokens, tokens + 10, tokens + 20), METADATA, 0.5)
    return recording, step


def test_a_recording_sees_the_tokens_of_its_request():
    seen = []
    recorded(lambda *shown: seen.append(shown))
    ((layer, start, query, key, value, scale),) = seen
    assert (layer, start, scale) == (5, 40, 0.5)
    assert query.flatten().tolist() == [1, 2]
    assert (key - query).unique().tolist() == [10]
    assert (value - query).unique().tolist() == [20]


def test_an_observer_that_raises_fails_its_document_alone():
    recording, step = recorded(lambda *_: 1 / 0)
    assert isinstance(recording.failure, ZeroDivisionError)
    assert step.reading is None
