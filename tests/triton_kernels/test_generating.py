"""A tiny model answers with the kernels as with the reference backend."""

import pytest

import gracekv
from gracekv.hf import graph_replay
from gracekv.testing.models import tiny_llama
from support.batches import prompts_of
from support.margins import assert_same_tokens, logits_over


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True])
def test_a_batch_of_prompts_generates_the_same_tokens(monkeypatch, replays):
    monkeypatch.setattr(graph_replay, "suits", lambda *args: replays)
    prompts = prompts_of(0, [(60, 2, 51), (45, 2, 36)])
    model = tiny_llama(layers=2)
    eager = gracekv.compress(model, prompts, ratio=3, backend="eager")
    ours = gracekv.compress(model, prompts, ratio=3, backend="triton")
    for got, want, alone in zip(ours.generate_ids(4), eager.generate_ids(4), eager, strict=True):
        assert_same_tokens(got, want, logits_over(alone))
