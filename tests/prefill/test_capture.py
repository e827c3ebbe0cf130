"""The capture against the stock forward pass, and its side effects."""

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForTokenClassification

from gracekv.errors import MissingCaptureError, NonFiniteError, PromptError, UnsupportedModelError
from gracekv.hf.capture import capture
from gracekv.prefill import Needs
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama, tiny_model
from support.prompts import random_prompt


def test_less_is_kept_where_less_is_needed():
    prompt = random_prompt(200, (5, 150), 190)
    prefill = capture(tiny_llama(), prompt, Needs())

    kept = {*range(118, 150), *range(158, 200)}
    assert prefill.query_positions.tolist() == sorted(kept)
    assert prefill.queries[0].shape == (4, len(kept), 16)
    full = capture(tiny_llama(), prompt)
    assert torch.equal(prefill.queries[1], full.queries_at(1, sorted(kept)))
    assert prefill.observed == {}
    with pytest.raises(MissingCaptureError):
        prefill.queries_at(0, [10])


def test_a_tokenizer_without_a_vocabulary_has_no_mark_of_it():
    assert "tokenizer" not in fingerprint(tiny_llama(), tokenizer=object())


def another_rope():
    model = tiny_llama()
    model.config.rope_parameters["rope_type"] = "spiral"
    return model


def flex(**options):
    model = tiny_model(**options)
    model.config._attn_implementation_internal = "flex_attention"
    return model


def another_forward():
    """As some speed patches leave a model: attention calls torch itself."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    return model


class Normed(LlamaAttention):
    """Under the name of a tested family, keys that are not mere rotations."""

    def forward(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (1.5 * cos, sin), **kwargs)


def another_attention():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Normed
    return model


UNSUPPORTED = [
    (another_forward, "does not call transformers' attention function"),
    (another_attention, "Layer 0 of .* rotates its keys in a way other than"),
    (lambda: flex(family="gpt_oss", attention="eager"), r"set_attn_implementation\('eager'\)"),
    (another_rope, "RoPE variant 'spiral'"),
    (flex, r"set_attn_implementation\('sdpa'\)"),
    (lambda: torch.nn.Linear(2, 2), "causal language model .*; got Linear"),
    (lambda: LlamaForTokenClassification(tiny_llama().config), "got LlamaForTokenClassification"),
]


@pytest.mark.parametrize(("make", "message"), UNSUPPORTED)
def test_unsupported_models_are_refused(make, message):
    model = make()
    with pytest.raises(UnsupportedModelError, match=message):
        capture(model, random_prompt())


BAD_PROMPTS = [
    (torch.arange(10), "takes one Prompt .*; got Tensor"),
    (Prompt.from_ids(torch.arange(90, 110), (2, 15)), "token id 109; the model knows 97"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused(prompt, message):
    with pytest.raises(PromptError, match=message):
        capture(tiny_llama(), prompt)


def test_broken_weights_are_reported():
    model = copy.deepcopy(tiny_llama())
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="keys of layer 1"):
        capture(model, random_prompt())
