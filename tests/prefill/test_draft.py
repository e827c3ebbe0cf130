"""The draft against a stock model that generates, and its attention."""

import pytest
import torch

from gracekv.errors import UnsupportedModelError
from gracekv.hf.capture import capture
from gracekv.prefill import Needs
from gracekv.prefill.observations import seconds_by_stage
from gracekv.testing.models import tiny_llama
from gracekv.value.draft_attention import Draft
from support.prompts import random_prompt


def stock(model, prompt, tokens):
    """Greedy tokens by one full pass each, and their attention in the last pass: [L, G, S, N]."""
    ids = prompt.ids[None]
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        attentions = torch.stack(model(ids, output_attentions=True).attentions)[:, 0]
    rows = attentions[:, :, len(prompt.ids) :, 5:60].double()
    return rows.unflatten(1, (model.config.num_key_value_heads, -1)).mean(2), ids[0, -tokens:]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_equals_the_attention_of_a_stock_generation(attention, rope):
    prompt = random_prompt()
    eager = tiny_llama(layers=3, rope=rope, attention="eager", bias=True)
    model = tiny_llama(layers=3, rope=rope, attention=attention, bias=True)
    model.generation_config.eos_token_id = None
    want, _ = stock(eager, prompt, 5)
    prefill = capture(model, prompt, Needs.observed(Draft(5)))
    assert set(seconds_by_stage(prefill.seconds, Needs.observed(Draft(5)))) == {"prefill", "draft"}
    draft = prefill.observation(Draft(5))
    assert draft.shape == (3, 2, 5, 55)
    assert draft.dtype == torch.float32
    torch.testing.assert_close(draft.double(), want, rtol=2e-4, atol=1e-6)


def test_ends_with_the_answer():
    prompt, model = random_prompt(), tiny_llama(layers=2)
    _, ids = stock(tiny_llama(layers=2, attention="eager"), prompt, 6)
    later = next(i for i in range(1, 6) if int(ids[i]) not in ids[:i].tolist())
    model.generation_config.eos_token_id = int(ids[later])
    assert capture(model, prompt, Needs.observed(Draft(6))).observation(Draft(6)).shape[2] == later


def test_is_made_only_when_asked_for_and_leaves_the_model_alone():
    prompt, model = random_prompt(), tiny_llama(layers=2)
    before = model.config._attn_implementation
    assert capture(model, prompt, Needs()).observed == {}
    prefills = (capture(model, prompt, Needs.observed(Draft(2))) for _ in range(2))
    first, again = (prefill.observation(Draft(2)) for prefill in prefills)
    assert torch.equal(first, again)
    assert model.config._attn_implementation == before


def test_refuses_a_draft_beyond_the_models_bound(monkeypatch):
    import gracekv.prefill.passes as module

    monkeypatch.setattr(module, "longest_sequence", lambda model, length: (72, "its window ends"))
    with pytest.raises(UnsupportedModelError, match="its window ends"):
        capture(tiny_llama(layers=2), random_prompt(), Needs.observed(Draft(3)))
    assert capture(tiny_llama(layers=2), random_prompt(), Needs.observed(Draft(2))).observed
