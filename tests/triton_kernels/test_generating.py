"""A tiny model answers over the kernels as it does over the reference backend."""

import pytest
import torch

import gracekv
from gracekv.hf import graph_replay
from gracekv.testing.models import tiny_llama


class Numbers:
    """A tokenizer whose words are the ids."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids.tolist()))


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True])
def test_a_batch_of_prompts_generates_the_same_tokens(monkeypatch, replays):
    monkeypatch.setattr(graph_replay, "suits", lambda *args: replays)
    rng = torch.Generator().manual_seed(0)
    tokenizer = Numbers()
    prompts = [
        gracekv.Prompt.from_ids(
            torch.randint(0, 97, (length,), generator=rng),
            (2, length - 9),
            question_end=length - 3,
            tokenizer=tokenizer,
        )
        for length in (60, 45)
    ]
    model = tiny_llama(layers=2)
    answers = {
        backend: gracekv.compress(model, prompts, ratio=3, backend=backend).generate(
            max_new_tokens=4
        )
        for backend in ("eager", "triton")
    }
    assert answers["triton"] == answers["eager"]
    assert all(len(answer.split()) == 4 for answer in answers["triton"])
