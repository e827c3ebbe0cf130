"""Families that are not listed: a short random prompt decides."""

import sys

import pytest
import torch
import transformers

import gracekv
from gracekv.errors import UnsupportedModelError, UntestedModelWarning
from gracekv.prefill import supported
from gracekv.prefill.model_layers import compressed_layers, model_layers
from gracekv.prefill.supported import check_model
from support.families import FAMILIES
from support.margins import assert_same_tokens, logits_over

IDS = torch.randint(0, 97, (80,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 70), question_end=76)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def unlisted(config, **fields):
    torch.manual_seed(0)
    config = config(**SIZES | {"eos_token_id": None, "pad_token_id": None} | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return model.eval()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_check_finds_the_rotations_that_are_listed(family, monkeypatch):
    model = FAMILIES[family].model()
    listed = compressed_layers(model)
    monkeypatch.setattr(supported, "TESTED_MODEL_TYPES", frozenset({"another"}))
    with pytest.warns(UntestedModelWarning, match=f"'{family}' is not tested"):
        check_model(model)
    assert compressed_layers(model) == listed
    check_model(model)  # Once a model: no second warning.


@pytest.mark.parametrize(
    ("config", "rotation"),
    [
        (transformers.StableLmConfig, "halves"),
        (transformers.CohereConfig, "interleaved_table"),
        (transformers.OlmoConfig, "halves"),
    ],
)
def test_an_unlisted_family_at_ratio_one_is_the_stock_model(config, rotation):
    model = unlisted(config)
    want = model.generate(IDS[None], max_new_tokens=6, do_sample=False)[:, 80:]
    with pytest.warns(UntestedModelWarning):
        result = gracekv.compress(model, PROMPT, ratio=1)
    assert {layer.rotation for layer in model_layers(model)} == {rotation}
    assert_same_tokens(result.generate_ids(6), want, logits_over(result))
    smaller = gracekv.compress(model, PROMPT, ratio=4, pipeline="gracekv")
    assert smaller.accounting.spent <= smaller.accounting.budget
    assert smaller.generate_ids(6).shape == (1, 6)


def test_attention_that_is_no_softmax_over_the_keys_is_refused(monkeypatch):
    model = unlisted(transformers.StableLmConfig, attn_implementation="eager")
    module = sys.modules[type(model.model.layers[1].self_attn).__module__]
    own = module.eager_attention_forward

    def sharper(attention, *args, scaling, **kwargs):
        return own(attention, *args, scaling=scaling * (1 + attention.layer_idx), **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", sharper)
    with pytest.raises(UnsupportedModelError, match=r"attention of layer 1 .* differs by"):
        check_model(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1)
            ),
            "attends to an encoder's output",
        ),
        (lambda: unlisted(transformers.GPTNeoXConfig), "Layer 0 of .* without the modules"),
    ],
)
def test_what_cannot_work_is_refused_with_the_layer(make, message):
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(make())
