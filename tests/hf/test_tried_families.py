"""Families without their own tests pass the check and are right, or are refused with a reason."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import gracekv
from gracekv.errors import UnsupportedModelError, UntestedModelWarning
from gracekv.prefill import Needs, model_layers, supported
from gracekv.prefill.supported import TESTED_MODEL_TYPES, check_model
from gracekv.segment.surprisal import Surprisal
from gracekv.testing.models import tiny_llama
from support.families import FAMILIES
from support.greedy_decoding import plain_answer
from support.margins import assert_same_tokens, logits_over
from support.tried_families import MIXED, TRIED, tried_model

IDS = torch.randint(1, 95, (60,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 50), question_end=56)


def test_no_family_is_on_both_lists():
    assert not set(TRIED) & TESTED_MODEL_TYPES


@pytest.mark.parametrize("family", TRIED)
def test_at_ratio_one_it_is_the_stock_model(family):
    model = tried_model(family)
    want = plain_answer(model, IDS, 4, min_new_tokens=4)
    with pytest.warns(UntestedModelWarning, match=f"'{family}' is not tested"):
        result = gracekv.compress(model, PROMPT, ratio=1)
    assert_same_tokens(result.generate_ids(4, min_new_tokens=4), want, logits_over(result))
    smaller = gracekv.compress(model, PROMPT, ratio=4, pipeline="gracekv")
    assert smaller.accounting.spent <= smaller.accounting.budget
    assert smaller.generate_ids(3).shape[0] == 1


# Their rotations have other names; their attention needs a passage's outputs in one piece.
@pytest.mark.filterwarnings("ignore::gracekv.errors.UntestedModelWarning")
@pytest.mark.parametrize("family", ["lfm2_moe", "afmoe"])
def test_a_passage_follows_and_reads_what_came_before(family):
    model = tried_model(family)
    book = gracekv.compress(model, gracekv.Prompt.from_ids(IDS[:40], (4, 40)), ratio=1)
    longer = book.extend(IDS[40:], ratio=1)
    want = plain_answer(model, IDS, 4, min_new_tokens=4)
    assert_same_tokens(longer.generate_ids(4, min_new_tokens=4), want, logits_over(longer))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_check_finds_the_rotations_that_are_listed(family, monkeypatch):
    model = FAMILIES[family].model()
    listed = model_layers.compressed_layers(model)
    monkeypatch.setattr(supported, "TESTED_MODEL_TYPES", frozenset({"another"}))
    with pytest.warns(UntestedModelWarning, match=f"'{family}' is not tested"):
        check_model(model)
    assert model_layers.compressed_layers(model) == listed
    check_model(model)  # Once per model: no second warning.


def test_attention_that_is_no_softmax_over_the_keys_is_refused(monkeypatch):
    model = tried_model("stablelm", attn_implementation="eager")
    module = sys.modules[type(model.model.layers[1].self_attn).__module__]
    own = module.eager_attention_forward

    def sharper(attention, *args, scaling, **kwargs):
        return own(attention, *args, scaling=scaling * (1 + attention.layer_idx), **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", sharper)
    with pytest.raises(UnsupportedModelError, match=r"differs by .* not a softmax"):
        check_model(model)


@pytest.mark.parametrize(("family", "options", "message"), [
    ("deepseek_v3", {}, r"Layer 0 .* latent attention \(MLA\)"),
    ("gemma3n_text", {"layer_types": MIXED, "num_kv_shared_layers": 2}, "Layer 2 .* earlier"),
    ("gemma4_text", {"layer_types": MIXED, "num_kv_shared_layers": 2}, "Layer 2 .* earlier"),
    ("llama4_text", {}, "Layer 0 .* of kind chunked_attention"),
    ("longcat_flash",
     {"head_dim": 8, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32},
     "describes .* layers, its decoder has"),
    ("mimo_v2_flash", {"head_dim": 24, "v_head_dim": 16}, "Layer 0 .* different dimensions"),
    ("minimax", {}, "does not run with transformers' cache layers"),
    ("moshi", {"sliding_window": 300}, "by a rotary module of the decoder"),
    ("jamba", {}, "states of .* start anew with several tokens"),
    ("hunyuan_v1_dense", {}, "Layer 0 .* rotates its keys in a way"),
    ("laguna", {"num_attention_heads_per_layer": [4, 2] * 2}, "layers of several sizes"),
    ("granite_swa", {"layer_types": MIXED, "layer_rope_theta": [1e4, 1e4, 1e4, 1e6]},
     "Layer 3 .* does not rotate by the same angles"),
    ("gpt_neox", {}, "Layer 0 .* without the modules"),
    ("nanochat", {}, "Layer 0 .* rotates its keys in a way"),
    ("zamba2", {"layers_block_type": ["linear_attention", "hybrid"] * 2},
     "Layer 1 .* without the modules self_attn"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_work_says_why(family, options, message, dtype):
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(tried_model(family, **options).to(dtype))


def test_layers_of_several_sizes_are_refused(monkeypatch):
    model, sizes = tiny_llama(), {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = [SimpleNamespace(**sizes, head_dim=dim) for dim in (16, 32)]
    known = {"model_type": "llama", "num_hidden_layers": 2, "is_heterogeneous": True}
    config = SimpleNamespace(**known, per_layer_config=layers)
    monkeypatch.setattr(model_layers, "text_config", lambda model: config)
    with pytest.raises(UnsupportedModelError, match=r"Layers 0 and 1 .* one size only"):
        model_layers.head_sizes(model)
    layers[1].head_dim = 16
    assert model_layers.head_sizes(model) == (4, 2, 16)


def test_layers_that_run_twice_are_refused():
    model = tried_model("stablelm")
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(UnsupportedModelError, match=r"Layer 1 .* runs more than once"):
        check_model(model)


@pytest.mark.parametrize(
    "fields", [{"peft_type": "PeftType.SHADOW"}, {"alora_invocation_tokens": [1]}]
)
def test_adapters_that_read_the_prompt_otherwise_are_refused(fields):
    model = tiny_llama()
    model.active_peft_config = SimpleNamespace(**fields)
    with pytest.raises(UnsupportedModelError, match="reads it twice"):
        check_model(model)


def test_a_family_that_multiplies_its_logits_has_its_own_surprisal():
    model = tried_model("hyperclovax", logits_scaling=0.125)
    seen = gracekv.capture(model, PROMPT, Needs.observed(Surprisal())).observation(Surprisal())
    with torch.no_grad():
        known = model(IDS[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    wanted = -known.gather(1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(seen[1:], wanted, rtol=1e-3, atol=1e-3)


def test_models_with_an_encoder_are_refused():
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    with pytest.raises(UnsupportedModelError, match="attends to an encoder's output"):
        check_model(transformers.T5ForConditionalGeneration(config))
