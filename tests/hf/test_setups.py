"""Setups that need more than what tests/fuzz/test_random_setups.py does with each."""

import dataclasses

import pytest
import torch

import gracekv
from gracekv.errors import CacheError
from gracekv.fit import LeastSquares, Regression, ValuesAndMass
from gracekv.testing.models import tiny_llama, tiny_model

IDS = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 138), question_end=146)


def test_a_result_of_autocast_is_saved_and_loaded_under_it(tmp_path):
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gracekv.compress(model, PROMPT, ratio=4)
        answer = result.generate_ids(6)
        result.save(tmp_path / "cache")
        assert gracekv.load(tmp_path / "cache", model).generate_ids(6).equal(answer)
    with pytest.raises(CacheError, match="autocast"):
        result.generate_ids(6)
    sliding = gracekv.compress(tiny_model("gemma3_text", layers=4, window=32), PROMPT, ratio=4)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CacheError, match="autocast"):
        sliding.generate_ids(6)
    sliding.model.bfloat16()
    with pytest.raises(CacheError, match=r"dtype \(float32 then, bfloat16 now\) differ"):
        sliding.generate_ids(6)


@pytest.mark.parametrize("fit", [None, Regression(), LeastSquares(), ValuesAndMass()])
def test_a_fit_of_no_entries_changes_nothing(fit):
    # Without a prefix, one entry a head is that of the last token, which is fed again.
    prompt = gracekv.Prompt.from_ids(IDS[:40], (0, 40))
    pipe = gracekv.Pipeline.named("attention-matching")
    pipe = pipe if fit is None else dataclasses.replace(pipe, fit=fit)
    result = gracekv.compress(tiny_llama(), prompt, entries_per_head=1, pipeline=pipe)
    assert not result.packed.entries().any()
    assert result.generate_ids(2).shape == (1, 2)
