"""Text prompts for models that also read images: the decoder has its own config."""

import pytest
import torch
import transformers

import gracekv
from gracekv.errors import CacheError, PromptError, UnsupportedModelError, UntestedModelWarning
from gracekv.hf import detach
from gracekv.vllm import export
from support.greedy_decoding import plain_answer
from support.margins import assert_same_tokens, logits_over
from support.tried_families import SIZES

IDS = torch.randint(1, 80, (70,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 60), question_end=66)
SHORTER = gracekv.Prompt.from_ids(IDS[5:45], (3, 30), question_end=36)
TEXT_SIZES = SIZES | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
HALF = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "rope_parameters": HALF}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EYES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14}
SIGHT = EYES | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
DEPTH = EYES | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
EVERY = {
    "gemma3": (SLIDING, SIGHT),
    "gemma4": (SLIDING | {"global_head_dim": 32, "hidden_size_per_layer_input": 0}, SIGHT),
    "llava": ({"model_type": "llama"}, SIGHT | {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, SIGHT),
    "qwen2_5_vl": ({"rope_parameters": ROPE}, DEPTH | {"fullatt_block_indexes": [0]}),
    "qwen3_5": (LINEAR, DEPTH | {"num_position_embeddings": 16}),
    "qwen3_vl": ({"rope_parameters": ROPE}, DEPTH | {"deepstack_visual_indexes": [0]}),
}


def model_of(family, **fields):
    decoder, eyes = EVERY[family]
    config = transformers.CONFIG_MAPPING[family]
    if family == "mistral3":
        eyes = eyes | {"model_type": "pixtral"}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config(text_config=TEXT_SIZES | decoder | fields, vision_config=eyes, image_token_id=96)
    )
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return model.eval()


@pytest.mark.parametrize("family", EVERY)
def test_text_prompts_at_ratio_one_are_the_stock_model(family):
    model = model_of(family)
    want = [plain_answer(model, prompt.ids, 5) for prompt in (PROMPT, SHORTER)]
    with pytest.warns(UntestedModelWarning, match=f"'{family}'"):
        alone = gracekv.compress(model, PROMPT, ratio=1)
    if "layer_types" in EVERY[family][0]:
        assert alone.packed.model_layers == (1, 3)
    rows = gracekv.compress(model, [PROMPT, SHORTER], ratio=1).generate_ids(5)
    # After an answer of two rows, and after one about an image.
    assert_same_tokens(alone.generate_ids(5), want[0], logits_over(alone))
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = torch.tensor([[-7]])
        assert_same_tokens(alone.generate_ids(5), want[0], logits_over(alone))
    assert_same_tokens(rows[:1], want[0], logits_over(alone))
    assert_same_tokens(rows[1:], want[1], logits_over(gracekv.compress(model, SHORTER, ratio=1)))
    if family != "qwen3_5":  # Its states cannot go back by tokens.
        found = alone.generate_ids(5, prompt_lookup_num_tokens=2)
        assert_same_tokens(found, want[0], logits_over(alone))
    smaller = gracekv.compress(model, PROMPT, ratio=4, pipeline="gracekv")
    assert smaller.accounting.spent <= smaller.accounting.budget
    assert smaller.generate_ids(3, num_beams=2).shape[0] == 1


def test_what_cannot_be_done_with_them_is_refused_by_name(tmp_path):
    model = model_of("qwen3_vl")
    with pytest.warns(UntestedModelWarning):
        result = gracekv.compress(model, PROMPT, ratio=2)
    with pytest.raises(UnsupportedModelError, match="rows and columns of images"):
        export(result, tmp_path / "context")
    seeing = gracekv.Prompt.from_ids(torch.cat([IDS[:9], torch.tensor([96]), IDS[9:]]), (4, 60))
    with pytest.raises(PromptError, match="stand for images"):
        gracekv.compress(model, seeing, ratio=2)
    model._tp_size = 2  # as transformers marks a sharded one
    with pytest.raises(UnsupportedModelError, match="q_proj of layer 0 is not split by heads"):
        gracekv.compress(model, PROMPT, ratio=2)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_used_cache_is_told_from_a_fresh_one(family):
    model = model_of(family)
    with pytest.warns(UntestedModelWarning):
        result = gracekv.compress(model, PROMPT, ratio=2)
    options = {"max_new_tokens": 5, "do_sample": False, "past_key_values": result.new_cache()}
    model.generate(**result.inputs, **options)
    with pytest.raises(CacheError, match="and a fresh cache"):
        model.generate(**result.inputs, **options)
    # Tokens that the mask hides have no positions.
    cuts = {name: x.split([69, 1], dim=1) for name, x in result.inputs.items()}
    padded = {name: torch.cat([a, 0 * b, 0 * b, b], dim=1) for name, (a, b) in cuts.items()}
    options["past_key_values"] = result.new_cache()
    assert model.generate(**padded, **options).shape == (1, 77)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_masks_are_checked_where_the_model_prepares_its_own(family):
    model, ones = model_of(family), torch.ones(2, 70, dtype=torch.long)
    with pytest.warns(UntestedModelWarning):
        batch = gracekv.compress(model, [PROMPT, SHORTER], ratio=4)
    ids, one = batch.inputs["input_ids"], batch[0]
    # `generate` drops a mask of ones.
    with pytest.raises(CacheError, match=r"at positions \[69, 39\]; .* given \[69, 69\]"):
        model.generate(ids, attention_mask=ones, past_key_values=batch.new_cache())
    hidden = torch.cat([ones[:1, :9], 0 * ones[:1, :9], ones[:1, :52]], dim=1)
    for x, mask, reason in (
        (batch, ones, "not hide the padding"),
        (batch, ones[:, :69], "up to position 68"),
        (one, hidden, "hides tokens of the compressed prompt"),
    ):
        with pytest.raises(CacheError, match=reason):
            model(ids[: len(mask), -1:], attention_mask=mask, past_key_values=x.new_cache())
    # Cuts of a limit know which tokens are padding without such a mask.
    limit = gracekv.Limit(entries_per_head=64, every=16)
    assert batch.generate_ids(30, limit=limit).shape == (2, 30)
    detach(model)
    assert not model._forward_pre_hooks


def test_a_decoder_has_an_attention_of_its_own():
    """Gemma 2 cannot run sdpa: transformers loads it with eager attention next to others' sdpa."""
    model = model_of("llava", model_type="gemma2", attn_logit_softcapping=2.0)
    sight, text = model.model.vision_tower, model.config.text_config
    assert (model.config._attn_implementation, text._attn_implementation) == ("sdpa", "eager")
    # Its own masks, not those of gracekv.
    sight.set_attn_implementation("eager")
    pixels, want = torch.randn(1, 3, 28, 28), plain_answer(model, PROMPT.ids, 5)
    before = model(PROMPT.ids[None]).logits, sight(pixels).last_hidden_state
    with pytest.warns(UntestedModelWarning):
        result = gracekv.compress(model, PROMPT, ratio=1)
    assert_same_tokens(result.generate_ids(5), want, logits_over(result))
    assert torch.equal(sight(pixels).last_hidden_state, before[1])
    detach(model)
    assert (model.config._attn_implementation, text._attn_implementation) == ("sdpa", "eager")
    assert torch.equal(model(PROMPT.ids[None]).logits, before[0])
