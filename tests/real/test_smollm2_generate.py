"""The public API on the embedded model: FullKV recovery, and generation from a compressed cache."""

import pytest
import torch

import gracekv
from support.chapter import CHAPTER
from support.greedy_decoding import plain_answer
from support.margins import LOGITS_OF_30_LAYERS, assert_same_tokens, logits_over
from support.skips import needs_smollm2
from support.stored_bytes import stored_bytes

# The model's own sampling settings, which cause a warning in greedy answers.
UNSET = {"temperature": None, "top_p": None, "top_k": None}

pytestmark = [pytest.mark.model, needs_smollm2]


@pytest.fixture(scope="module")
def loaded():
    from gracekv.hf.smollm2 import load_smollm2

    return load_smollm2()


@pytest.fixture(scope="module")
def prompt(loaded):
    return gracekv.Prompt.from_chat(
        loaded[1], context=CHAPTER[:800], question="What did the White Rabbit say?"
    )


@pytest.fixture(scope="module")
def stock(loaded, prompt):
    """Greedy tokens and the prompt's cache of the untouched model."""
    model, _ = loaded
    with torch.no_grad():
        cache = model(prompt.ids[None], use_cache=True).past_key_values
    return plain_answer(model, prompt.ids, 8, **UNSET), cache


@pytest.mark.parametrize("pipeline", ["gracekv", "fullkv"])
def test_ratio_one_is_full_kv(loaded, prompt, stock, pipeline):
    tokens, cache = stock
    result = gracekv.compress(loaded[0], prompt, ratio=1, pipeline=pipeline)
    covered = len(prompt.ids) - 1
    # Entries are exact: copies from the same forward pass.
    for packed, full in zip(result.packed.layers, cache.layers, strict=True):
        for g in range(packed.heads):
            keys, values, positions, log_m = packed.head(g)
            assert torch.equal(keys, full.keys[0, g, :covered])
            assert torch.equal(values, full.values[0, g, :covered])
            assert torch.equal(positions.long(), torch.arange(covered))
            assert not log_m.any()
    assert_same_tokens(
        result.generate_ids(8), tokens, logits_over(result), margin=LOGITS_OF_30_LAYERS
    )


def test_a_compressed_cache_generates_and_is_smaller(loaded, prompt):
    model, _ = loaded
    result = gracekv.compress(model, prompt, ratio=16)
    accounting = result.accounting
    # Layers may share a storage.
    stored = stored_bytes(t for layer in result.packed.layers for t in (layer.keys, layer.values))
    assert stored == accounting.bytes < accounting.full_bytes / 4
    assert accounting.spent <= accounting.budget == 90 * prompt.spans.context_length // 16
    by_hand = plain_answer(model, prompt.ids, 4, past_key_values=result.new_cache(), **UNSET)
    assert torch.equal(by_hand, result.generate_ids(4))
    assert isinstance(result.generate(max_new_tokens=4), str)
    assert result.timings.construction > 0
