"""Turns that are appended to one cache, or fed to it without `generate`."""

import pytest
import torch

import gracekv
from gracekv.errors import CacheError
from gracekv.testing.models import tiny_llama

IDS = torch.randint(2, 97, (150,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=3)


@pytest.fixture(scope="module")
def result(model):
    prompt = gracekv.Prompt.from_ids(IDS, (4, 138), question_end=146)
    return gracekv.compress(model, prompt, ratio=4)


def test_turns_appended_to_one_cache_equal_feeding_all_at_once(model, result):
    """Three user turns on one cache; then the same tokens in one forward pass over a fresh one."""
    cache, ids = result.new_cache(), result.inputs["input_ids"]
    for start, count in ((10, 4), (40, 1), (60, 17)):
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6,
            do_sample=False, pad_token_id=1,
        )  # fmt: skip
        ids = torch.cat([ids, IDS[None, start : start + count]], dim=1)
    with torch.no_grad():
        seen = cache.get_seq_length()
        by_turns = model(ids[:, seen:], past_key_values=cache).logits[:, -1]
        at_once = model(ids[:, 149:], past_key_values=result.new_cache()).logits[:, -1]
    torch.testing.assert_close(by_turns, at_once, rtol=0, atol=2e-4)
    assert cache.layers[0].packed.entries is result.new_cache().layers[0].packed.entries


def test_conversations_fork_from_one_prompt(model, result):
    """Two users continue the same compressed prompt at the same time."""
    turns = [IDS[None, 3:9], IDS[None, 50:53]]
    alone = []
    with torch.no_grad():
        for turn in turns:
            cache = result.new_cache()
            first = model(turn, past_key_values=cache).logits
            alone.append((first, model(turn, past_key_values=cache).logits))
        caches = [result.new_cache(), result.new_cache()]
        for step in (0, 1):
            for turn, cache, want in zip(turns, caches, alone, strict=True):
                torch.testing.assert_close(
                    model(turn, past_key_values=cache).logits, want[step], rtol=0, atol=0
                )


def test_whole_sequences_may_be_fed_without_generate(model, result):
    """As assisted decoding does: with a mask as long as the ids, or positions from 0."""
    ids = result.inputs["input_ids"]
    with torch.no_grad():
        want = model(ids[:, 149:], past_key_values=result.new_cache()).logits
        masked = model(**result.inputs, past_key_values=result.new_cache()).logits
        placed = model(
            ids, position_ids=torch.arange(150)[None], past_key_values=result.new_cache()
        ).logits
        bare = model.model(ids[:, 149:], past_key_values=result.new_cache()).last_hidden_state
    assert torch.equal(masked, want)
    assert torch.equal(placed, want)
    assert torch.equal(model.lm_head(bare), want)


def test_a_sequence_that_is_wholly_cached_has_nothing_to_feed(model, result):
    ids = IDS[None, :149]
    with pytest.raises(CacheError, match="up to position 148, but with them the cache covers 298"):
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=result.new_cache())
