"""Everything that `generate()` offers, over a compressed cache.

Modes that must equal the stock model are compared at ratio 1, where nothing is lost; modes that
must not change the answer (assistance, chunks, streaming) with plain decoding over the same cache.
Identical computations are compared exactly; otherwise greedy tokens may differ at a tie.
"""

from threading import Thread

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import gracekv
from gracekv.errors import CacheError
from gracekv.hf import attach, detach
from gracekv.testing.models import tiny_llama
from support.byte_tokenizer import byte_tokenizer
from support.forward_passes import fed_shapes
from support.greedy_decoding import plain_answer
from support.margins import assert_same_tokens, logits_over
from support.streamed import Written

IDS = torch.randint(2, 97, (150,), generator=torch.Generator().manual_seed(0))
MODEL, RATIO = {"layers": 3}, 4
SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>"}
# One token per printable character: a byte-level space, and the rest.
CHARACTERS = ["\u0120", *map(chr, range(33, 127))]
TOKENIZER = byte_tokenizer([*SPECIAL.values(), *CHARACTERS], **SPECIAL)
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 138), question_end=146, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def assistant():
    """Another model with the same vocabulary, so its guesses are mostly wrong."""
    return tiny_llama(layers=1, seed=5)


def over(model, result, cache=None, **kwargs):
    """New ids of `model.generate`, called as a user does, over the result's or the given cache."""
    cache = result.new_cache() if cache is None else cache
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1} | kwargs
    return model.generate(**result.inputs, past_key_values=cache, **options)[:, len(IDS) :]


def stock(model, **kwargs):
    detach(model)
    try:
        return plain_answer(model, IDS, 12, **{"pad_token_id": 1, **kwargs})
    finally:
        attach(model)


class Second(LogitsProcessor):
    """Forbids the likeliest token, and records the lengths of the sequences that it gets."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores.scatter(1, scores.argmax(dim=1, keepdim=True), -torch.inf)


class Enough(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, len(IDS) :].sum(dim=1) > 300


MODES = {
    "greedy": dict,
    "sampling": lambda: {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 20},
    "several": lambda: {"do_sample": True, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beam samples": lambda: {"num_beams": 3, "do_sample": True},
    "early beams": lambda: {"num_beams": 3, "early_stopping": True, "eos_token_id": [5, 9, 40]},
    "processor": lambda: {"logits_processor": LogitsProcessorList([Second()])},
    "repetition": lambda: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "criteria": lambda: {"stopping_criteria": StoppingCriteriaList([Enough()])},
    "configuration": lambda: {"generation_config": GenerationConfig(min_p=0.1, do_sample=True)},
    "prefix of length": lambda: {"min_new_tokens": 5, "eos_token_id": list(range(2, 60))},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_stock_model_s_where_nothing_is_lost(model, whole, mode):
    torch.manual_seed(1)
    want = stock(model, **MODES[mode]())
    torch.manual_seed(1)
    ours = over(model, whole, **MODES[mode]())
    if mode == "greedy":
        assert_same_tokens(ours, want, logits_over(whole))
    else:  # Samples, beams and processors for one fixed prompt without near ties.
        assert torch.equal(ours, want)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_repeats_over_one_packed_part(model, result, mode):
    """Continuations leave no trace: the second starts where the first did."""
    packed = list(result.packed.layers)
    before = [layer.keys.clone() for layer in packed]
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        cache = result.new_cache()
        runs.append(over(model, result, cache, **MODES[mode]()))
        assert all(x.packed.entries is y for x, y in zip(cache.layers, packed, strict=True))
    assert torch.equal(*runs)
    assert all(torch.equal(x, y.keys) for x, y in zip(before, packed, strict=True))


def test_a_processor_sees_prompt_and_answer(model, result):
    second = Second()
    changed = over(model, result, logits_processor=LogitsProcessorList([second]))
    assert second.lengths == list(range(150, 162))
    assert over(model, result)[0, 0] != changed[0, 0]


def test_stop_strings_end_the_answer(model, result):
    plain = over(model, result)[0]
    word = TOKENIZER.decode(plain[3:5])
    # The word may occur earlier, if the answer repeats itself.
    end = next(n for n in range(1, 6) if word in TOKENIZER.decode(plain[:n]))
    stopped = over(model, result, stop_strings=[word], tokenizer=TOKENIZER)[0]
    assert torch.equal(stopped, plain[:end])
    # The result knows its tokenizer.
    told = TOKENIZER.decode(plain[:end], skip_special_tokens=True)
    assert result.generate(12, stop_strings=word) == told
    assert result.generate(12, generation_config=GenerationConfig(stop_strings=word)) == told


def test_a_streamer_gets_each_token_as_it_comes(model, result):
    plain = over(model, result)[0]
    written = Written()
    over(model, result, streamer=written)
    assert written.ended
    assert written.pieces[0] == IDS.tolist()
    assert written.pieces[1:] == [[token] for token in plain.tolist()]
    text = TextIteratorStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
    thread = Thread(target=result.generate, args=(12,), kwargs={"streamer": text})
    thread.start()
    assert "".join(text) == TOKENIZER.decode(plain, skip_special_tokens=True)
    thread.join()


@pytest.mark.parametrize("kind", ["lookup", "assistant", "itself"])
def test_assisted_decoding_changes_speed_only(model, assistant, result, kind, monkeypatch):
    options = {
        "lookup": {"prompt_lookup_num_tokens": 4},
        "assistant": {"assistant_model": assistant},
        "itself": {"assistant_model": tiny_llama(layers=3)},
    }[kind]
    plain = over(model, result, max_new_tokens=20)
    fed = fed_shapes(model, monkeypatch)
    cache = result.new_cache()
    assisted = over(model, result, cache, max_new_tokens=20, **options)
    assert_same_tokens(assisted, plain, logits_over(result))
    # The first step gets the last prompt token and the guesses, not the prompt again.
    assert max(length for _, length in fed) <= 21
    assert cache.get_seq_length() == 150 + 19
    if kind == "itself":
        # With a compressed cache, the uncompressed model is a good assistant and saves steps.
        assert len(fed) < 20


def test_assistance_cannot_show_hidden_states_of_the_prompt(model, result):
    with pytest.raises(CacheError, match="Leave output_hidden_states out"):
        over(model, result, prompt_lookup_num_tokens=3, output_hidden_states=True)


def test_assistance_in_a_second_turn(model, assistant, result):
    """The cached part then consists of packed entries and a tail; neither is fed again."""
    runs = []
    said = torch.cat([over(model, result, max_new_tokens=5)[0], IDS[20:31]])
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        cache = result.new_cache()
        assert torch.equal(over(model, result, cache, max_new_tokens=5)[0], said[:5])
        turn = torch.cat([IDS, said])
        runs.append(plain_answer(model, turn, 9, past_key_values=cache, **options)[0])
    for assisted in runs[1:]:
        assert_same_tokens(assisted, runs[0], logits_over(result, said))


def test_a_model_that_asks_for_a_static_cache_uses_the_compressed_one(model, result, monkeypatch):
    want = result.generate_ids(6)
    monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
    assert torch.equal(result.generate_ids(6), want)


def test_whole_sequences_may_be_fed_without_generate(model, result):
    """As in assisted decoding: with a mask as long as the ids, or positions from 0."""
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
