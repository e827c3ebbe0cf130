"""Compressed layers next to layers that keep their own window or state."""

import copy
import dataclasses
from unittest.mock import Mock

import pytest
import torch

import gracekv
from gracekv.errors import CacheError, ObserverError, SavedCacheError, UnsupportedModelError
from gracekv.hf import attach
from gracekv.hf.base_result import prompt_facts
from gracekv.hf.capture import capture
from gracekv.hf.load_result import saved_run
from gracekv.prefill.options import CaptureOptions
from gracekv.testing.models import tiny_model
from gracekv.vllm import export
from support.families import FAMILIES
from support.greedy_decoding import greedy, plain_answer
from support.margins import assert_same_beams, assert_same_steps, assert_same_tokens, logits_over
from support.prompts import WORDS, random_prompt

WINDOW, VOCABULARY = 24, 300
IDS = torch.arange(100) * 13 % VOCABULARY
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 90))


def model_of(family, **options):
    return FAMILIES[family].model(vocabulary=VOCABULARY, **options)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.is_mixed])
def test_questions_turns_and_passages_at_ratio_one_are_the_stock_model(family, tokenizer):
    """Several tokens at once over every kind of layer: questions, further turns, extensions."""
    model, plain = model_of(family), model_of(family)
    book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=WORDS), ratio=1)
    cache = book.new_cache()
    ids = book.prompt.ids[: book.prompt.spans.context_end]
    more = torch.arange(40, 59)
    for part in (more[:7], more[7:]):
        ids = torch.cat([ids, part])
        got, logits = greedy(model, ids, cache, 5)
        want, want_logits = greedy(plain, ids, tokens=5)
        assert_same_steps(got, logits, want, want_logits, margin=5e-4)
        ids = torch.cat([ids, got[:-1]])
    if family == "gemma2":
        with pytest.raises(CacheError, match="caps its attention logits"):
            book.extend(more, ratio=1)
        return
    longer = book.extend(more, ratio=1)
    ids = torch.cat([longer.prompt.ids[: longer.prompt.spans.context_end], more[:3]])
    want, want_logits = greedy(plain, ids, tokens=5)
    got, logits = greedy(model, ids, longer.new_cache(), 5)
    assert_same_steps(got, logits, want, want_logits, margin=5e-4)
    assert longer.accounting.other_bytes == book.accounting.other_bytes


def test_questions_of_different_lengths_are_answered_as_alone(tokenizer):
    model = model_of("gemma3_text")
    book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=WORDS), ratio=3)
    questions = ["Who?", "Where is the longest word of all these words?"]
    assert book.ask(questions, 6) == [book.ask(question, 6) for question in questions]
    prompts = [gracekv.Prompt.from_ids(IDS[:end], (4, 90), question_end=90) for end in (95, 99)]
    with pytest.raises(CacheError, match=r"^\[5, 9\] tokens follow"):
        gracekv.compress(model, prompts, ratio=2).generate_ids(2)


FAILING = [
    ("llama", "model.layers.1", 0),
    ("olmo3", "lm_head", 2),
    ("qwen3_next", "lm_head", 2),
]


@pytest.mark.parametrize(("family", "part", "tokens"), FAILING)
def test_a_turn_that_fails_is_undone_in_all_layers(family, part, tokens, tokenizer):
    model = model_of(family)
    book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=WORDS), ratio=3)
    with book.chat() as chat, book.chat() as other:
        assert chat.ask("Who?", 5) == other.ask("Who?", 5)
        before = [layer.logical_length for layer in chat._cache.grace_layers]
        run = Mock(side_effect=[None] * tokens + [RuntimeError("no power")])
        hook = model.get_submodule(part).register_forward_pre_hook(run)
        with pytest.raises(RuntimeError, match="no power"):
            chat.ask("And then?", 5)
        hook.remove()
        assert [layer.logical_length for layer in chat._cache.grace_layers] == before
        assert chat.ask("And then?", 5) == other.ask("And then?", 5)


def test_a_refused_call_repeats_no_states():
    model = model_of("qwen3_next")
    result = gracekv.compress(model, PROMPT, ratio=3)
    cache, last = result.new_cache(), PROMPT.ids[None, -1:]
    with gracekv.attached(model), torch.no_grad():
        with pytest.raises(CacheError, match="a fresh cache"):
            model(last.repeat(3, 1), attention_mask=torch.ones(3, 9), past_key_values=cache)
        got = model(last, past_key_values=cache).logits
        torch.testing.assert_close(got, model(last, past_key_values=result.new_cache()).logits)


def test_a_window_of_one_head_holds_nothing_beside_itself():
    model, ids = model_of("gemma3_text", kv_heads=1), torch.arange(300) * 13 % VOCABULARY
    result = gracekv.compress(model, gracekv.Prompt.from_ids(ids, (4, 290)), ratio=3)
    for tensor in result.packed.other_layers[0].tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_assisted_decoding_and_resets_go_back_to_the_prompt():
    model = model_of("gemma3_text")
    result = gracekv.compress(model, PROMPT, ratio=3)
    got = result.generate_ids(8, prompt_lookup_num_tokens=3)
    assert_same_tokens(got, result.generate_ids(8), logits_over(result))
    cache = result.new_cache()
    options = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
    first = model.generate(**result.inputs, **options)
    cache.reset()
    assert torch.equal(model.generate(**result.inputs, **options), first)


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2"])
def test_a_continuation_with_gradients_can_be_copied(family):
    model = model_of(family)
    cache = gracekv.compress(model, PROMPT, ratio=3).new_cache()
    attach(model)
    model(IDS[-1:][None], past_key_values=cache)
    twin = copy.deepcopy(cache)
    logits = [model(IDS[:1][None], past_key_values=x).logits for x in (cache, twin)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_each_continuation_has_its_own_states(family):
    model = model_of(family)
    result = gracekv.compress(model, PROMPT, ratio=3)
    states = result.packed.other_layers
    before = [x.clone() for state in states for x in state.tensors.values()]
    attach(model)
    one, two = result.new_cache(), result.new_cache()
    last, token = IDS[-1:][None], torch.tensor([[5]])
    with torch.no_grad():
        model(last, past_key_values=one)
        twin = copy.deepcopy(one)
        assert all(x is y for x, y in zip(twin._other_layers, states, strict=True))
        want = model(token, past_key_values=one).logits
        assert torch.equal(model(token, past_key_values=twin).logits, want)
        model(last.repeat(3, 1), past_key_values=two)
        two.batch_select_indices(torch.tensor([2, 0]))
        got = model(token.repeat(2, 1), past_key_values=two).logits
        torch.testing.assert_close(got, want.repeat(2, 1, 1), rtol=0, atol=1e-4)
        with pytest.raises(CacheError, match="2 prompts, the model was given 3 rows"):
            model(token.repeat(3, 1), past_key_values=two)
    assert all(map(torch.equal, before, (x for state in states for x in state.tensors.values())))
    with pytest.raises(CacheError, match=r"Layer 0 .* cannot remove"):
        two.crop(-1)


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3_text", "lfm2", "qwen3_next"])
def test_beams_at_ratio_one_are_those_of_the_stock_model(family):
    model, plain = model_of(family), model_of(family)
    result = gracekv.compress(model, PROMPT, ratio=1)
    options = {"num_beams": 4, "num_return_sequences": 4}
    want = plain_answer(plain, IDS, 8, **options)
    assert_same_beams(result.generate_ids(8, **options), want, result)


def test_states_alone_and_stateful_models_are_refused():
    model = model_of("qwen3_next")
    result = gracekv.compress(model, PROMPT, ratio=3)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        result.generate_ids(4, prompt_lookup_num_tokens=3)
    model.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(UnsupportedModelError, match="no layer of kind full_attention"):
        gracekv.compress(model, result.prompt, ratio=3)


def test_budgets_and_numbers_count_compressed_layers_alone():
    model = model_of("gpt_oss")
    result = gracekv.compress(model, PROMPT, entries_per_head=20, pipeline="streaming-llm")
    kept = result.accounting
    assert kept.entries.shape == (2, 2)
    assert kept.budget == kept.spent == 2 * 2 * 20
    assert result.packed.model_layers == (1, 3)
    # Two layers, keys and values, two heads of dimension 16, 23 tokens.
    size = 2 * 2 * 2 * (WINDOW - 1) * 16 * 4
    assert kept.other_bytes == {"sliding_attention": size}
    assert sum(kept.held_bytes.values()) >= kept.bytes + size
    both = gracekv.compress(model, [PROMPT, PROMPT], ratio=4).accounting
    assert both.other_bytes == {"sliding_attention": 2 * size}


def test_old_names_of_other_layers_work_and_say_so(tmp_path):
    model = model_of("gpt_oss")
    prefill = gracekv.capture(model, PROMPT)
    result = gracekv.compress(model, PROMPT, prefill=prefill, ratio=4)
    for owner, old, new in (
        (result.accounting, "kept_bytes", "other_bytes"),
        (result.packed, "kept", "other_layers"),
        (prefill, "kept", "other_layers"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
            assert getattr(owner, old) is getattr(owner, new)
    # Files of 0.2 have the old name.
    facts = prompt_facts(PROMPT, result.run)
    facts["accounting"]["kept_bytes"] = facts["accounting"].pop("other_bytes")
    run = saved_run(facts, result.packed, {})
    assert run.accounting.other_bytes == result.run.accounting.other_bytes != {}


@pytest.mark.parametrize("family", ["ministral", "qwen3_next"])
def test_what_needs_every_token_of_every_layer_is_refused_by_name(family, tmp_path):
    model = model_of(family)
    for recipe in ("gracekv-draft", "kvzip-two-pass"):
        with pytest.raises(
            ObserverError, match=r"(Ministral|Qwen3Next).* layer 0 \((sliding|linear)_attention\)"
        ):
            gracekv.compress(model, PROMPT, ratio=2, pipeline=recipe)
    result = gracekv.compress(model, PROMPT, ratio=2)
    with pytest.raises(CacheError, match="static tail needs compressed layers"):
        result.new_cache().with_static_tail(16)
    with pytest.raises(UnsupportedModelError, match=r"vLLM .* layer 0 is of kind"):
        export(result, tmp_path / "context")
    capped = model_of("gemma2")
    with pytest.raises(UnsupportedModelError, match="'expected_attention' has a closed form"):
        gracekv.compress(capped, PROMPT, ratio=2, pipeline="expected-attention")


def test_a_file_whose_states_are_not_whole_is_refused(tmp_path, monkeypatch):
    model = model_of("cohere2")
    result = gracekv.compress(model, PROMPT, ratio=2)
    state, *others = result.packed.other_layers
    tensors = {name: x[:, :, 1:] for name, x in state.tensors.items()}
    short = dataclasses.replace(state, tensors=tensors)
    for states, message in (((short, *others), "layer 0 does not hold"), (others, "3 layers")):
        broken = dataclasses.replace(result.packed, other_layers=tuple(states))
        monkeypatch.setattr(type(result), "packed", broken)
        result.save(tmp_path / "cache")
        monkeypatch.undo()
        with pytest.raises(SavedCacheError, match=message):
            gracekv.load(tmp_path / "cache", model)


@pytest.mark.parametrize("length", [12, 23, 24, 25, 26])
def test_prompts_around_the_window(length):
    model, plain = (tiny_model("gemma3_text", layers=2, window=WINDOW, seed=3) for _ in range(2))
    prompt = random_prompt(length, (1, length - 2), length, seed=1)
    want, want_logits = greedy(plain, prompt.ids, tokens=4)
    result = gracekv.compress(
        model, prompt, prefill=capture(model, prompt, options=CaptureOptions(chunk=5)), ratio=1
    )
    got, logits = greedy(model, prompt.ids, result.new_cache(), 4)
    assert_same_steps(got, logits, want, want_logits, margin=5e-4)
