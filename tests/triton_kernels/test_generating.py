"""A tiny model answers over the kernels as it does over the reference backend."""

import pytest

import gracekv
from gracekv.hf import graph_replay
from gracekv.testing.models import tiny_llama
from support.batches import Numbers, prompts_of


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True])
def test_a_batch_of_prompts_generates_the_same_tokens(monkeypatch, replays):
    monkeypatch.setattr(graph_replay, "suits", lambda *args: replays)
    prompts = prompts_of(0, [(60, 2, 51), (45, 2, 36)], tokenizer=Numbers())
    model = tiny_llama(layers=2)
    eager, ours = (
        gracekv.compress(model, prompts, ratio=3, backend=backend).generate(max_new_tokens=4)
        for backend in ("eager", "triton")
    )
    assert ours == eager
    assert all(len(answer.split()) == 4 for answer in ours)
