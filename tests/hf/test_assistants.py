"""Assistant models: rejected candidates are removed from every kind of layer."""

import copy

import pytest
import torch

import gracekv
from gracekv.errors import CacheError
from gracekv.hf import attach
from gracekv.hf.resumed_layer import is_resumed
from gracekv.registry.hyperparameter import parts_of
from support.asked_context import steps
from support.families import FAMILIES
from support.margins import assert_same_tokens, logits_over
from support.prompts import WORDS

VOCABULARY = 300
IDS = torch.arange(100) * 13 % VOCABULARY
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 90))
GOES_BACK = [x for x, family in FAMILIES.items() if family.is_mixed and family.can_go_back]


def assistant_of(family):
    """A model that sometimes agrees with that of `family`."""
    twin = FAMILIES[family].model(vocabulary=VOCABULARY)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = twin.lm_head.weight
        weight += 0.4 * weight.std() * torch.randn(weight.shape, generator=rng)
    return twin


def state_shapes(chat):
    states = [layer.state() for layer in chat._cache.layers if is_resumed(layer)]
    return [part.shape for part in parts_of(states) if isinstance(part, torch.Tensor)]


@pytest.fixture
def cropped(monkeypatch):
    """How many tokens each call of `GraceCache.crop` removes."""
    removed, own = [], gracekv.hf.GraceCache.crop

    def crop(cache, tokens_to_remove):
        removed.append(-tokens_to_remove)
        return own(cache, tokens_to_remove)

    monkeypatch.setattr(gracekv.hf.GraceCache, "crop", crop)
    return removed


@pytest.mark.parametrize("family", GOES_BACK)
def test_an_assistant_changes_no_answer(family, cropped):
    result = gracekv.compress(FAMILIES[family].model(vocabulary=VOCABULARY), PROMPT, ratio=3)
    want = result.generate_ids(12)
    got = result.generate_ids(12, assistant_model=assistant_of(family))
    assert_same_tokens(got, want, logits_over(result))
    # Some candidates were rejected, some accepted.
    assert any(cropped)
    assert len(cropped) < 12


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_a_conversation_goes_on_after_an_assisted_turn(family, cropped, tokenizer):
    model = FAMILIES[family].model(vocabulary=VOCABULARY)
    book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=WORDS), ratio=3)
    assistant = assistant_of(family)
    with book.chat() as plain, book.chat() as assisted:
        for question, options in (
            ("Who?", {"assistant_model": assistant}),
            ("And then?", {}),
            ("Why?", {"assistant_model": assistant}),
        ):
            with torch.inference_mode(bool(options)):
                assisted.ask(question, 9, **options)
            plain.ask(question, 9)
            assert state_shapes(assisted) == state_shapes(plain)
        context, got, want = book.packed.length, assisted._ids, plain._ids

    def logits(before):
        return steps(model, want[: context + len(before)], book.new_cache(), 1)[1]

    assert_same_tokens(got[context:], want[context:], logits)
    assert any(cropped)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_what_cannot_go_back_stays_whole(family):
    """Only the tokens since compression, and in some layers only recorded ones, can be removed."""
    model = FAMILIES[family].model(vocabulary=VOCABULARY)
    cache = gracekv.compress(model, PROMPT, ratio=3).new_cache()
    attach(model)
    with torch.no_grad():
        model(IDS[None, -1:], past_key_values=cache)
        with pytest.raises(CacheError, match=r"Layer 0 .* cannot remove"):
            cache.crop(-1)
        cache.crop(0)
        cache.activate_past_recording()
        cache.crop(0)
        model(torch.tensor([[5, 6]]), past_key_values=cache)
        with pytest.raises(CacheError, match="Only the 3 tokens since compression"):
            cache.crop(-4)
        want = model(torch.tensor([[7]]), past_key_values=copy.deepcopy(cache)).logits
        model(torch.tensor([[8, 9]]), past_key_values=cache)
        cache.crop(-2)
        with pytest.raises(CacheError, match=r"Layer 0 .* cannot remove"):
            cache.crop(-1)  # Only the tokens that the next step reads are left.
        got = model(torch.tensor([[7]]), past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
