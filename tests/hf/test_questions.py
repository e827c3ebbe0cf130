"""A context that is compressed once and asked later: one question, or many."""

import contextlib
import weakref

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import gracekv
from gracekv import recipes
from gracekv.errors import ConfigError, PromptError
from support.asked_context import TEXT, same_greedy, steps
from support.forward_passes import fed_shapes
from support.greedy_decoding import greedy

QUESTIONS = ["Who fell?", "Where is Alice sitting, and what does she see first of all?", "Why?"]
SEVERAL = GenerationConfig(do_sample=True, num_return_sequences=2)
SHORT = GenerationConfig(max_new_tokens=2)


def asked(tokenizer, text):
    """The ids of context and question that `from_chat` makes of the same texts."""
    return gracekv.Prompt.from_chat(tokenizer, context=TEXT, instruction="Read.", question=text).ids


def test_a_prompt_without_a_question_takes_the_recipe_made_for_it(model, book, prompt, tokenizer):
    assert book.pipeline == gracekv.Pipeline.named(recipes.DEFAULT_WITHOUT_QUESTION)
    assert book.packed.length == prompt.spans.context_end < len(prompt.ids) - 1
    with_question = gracekv.Prompt.from_chat(tokenizer, context=TEXT, question="Who?")
    assert gracekv.compress(model, with_question, ratio=4).pipeline == gracekv.Pipeline.default()
    with pytest.raises(ConfigError, match="Name one: pipeline='gracekv-agnostic'"):
        gracekv.compress(model, [prompt, with_question], ratio=4)


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_that_of_decoding_by_hand(model, tokenizer, book, question):
    want, logits = steps(model, asked(tokenizer, question), book.new_cache(), 8)
    got = gracekv.hf.questions.ask_ids(book, [question], 8, {"eos_token_id": 1999})[0]
    same_greedy(got, want, logits)
    text = book.ask(question, max_new_tokens=8, eos_token_id=1999)
    assert text == tokenizer.decode(got, skip_special_tokens=True)


@pytest.mark.parametrize("question", QUESTIONS)
def test_where_nothing_is_removed_it_is_the_stock_models_answer(model, tokenizer, whole, question):
    got = gracekv.hf.questions.ask_ids(whole, [question], 8, {"eos_token_id": 1999})[0]
    same_greedy(got, *greedy(model, asked(tokenizer, question), tokens=8))


def test_questions_of_any_lengths_are_answered_together(model, tokenizer, book):
    rows = gracekv.hf.questions.ask_ids(book, QUESTIONS, 8, {"eos_token_id": 1999})
    for row, question in zip(rows, QUESTIONS, strict=True):
        want, logits = steps(model, asked(tokenizer, question), book.new_cache(), 8)
        same_greedy(row, want, logits)
    assert len(book.ask(QUESTIONS, max_new_tokens=4)) == 3
    limits = [gracekv.Limit(entries_per_head=10**4, every=every, window=1) for every in (1, 2)]
    one, two = (book.ask(QUESTIONS, max_new_tokens=4, limit=limit) for limit in limits)
    assert one == two
    assert book.ask([QUESTIONS[0]], max_new_tokens=4) == [book.ask(QUESTIONS[0], max_new_tokens=4)]


def test_penalties_for_repetition_count_no_padding(tokenizer, book, monkeypatch):
    monkeypatch.setattr(book.model.generation_config, "pad_token_id", 1999)
    seen = []

    options = {"logits_processor": [lambda ids, scores: seen.extend(ids.tolist()) or scores]}
    short = gracekv.Prompt.from_chat(tokenizer, context=TEXT[:300])
    book.ask(QUESTIONS, 1, **options)
    gracekv.compress(book.model, [book.prompt, short], ratio=4).generate_ids(1, **options)
    want = [*(asked(tokenizer, question) for question in QUESTIONS), book.prompt.ids, short.ids]
    # N-grams are the row's own, too, except for those of a first token, which no answer repeats.
    for ids, own in zip(seen, want, strict=True):
        assert ids == [own[0]] * (len(ids) - len(own)) + own.tolist()


def test_the_context_is_never_read_again(model, book, monkeypatch):
    fed = fed_shapes(model, monkeypatch)
    book.ask(QUESTIONS, max_new_tokens=3, eos_token_id=1999)
    with book.chat() as chat:
        chat.ask(QUESTIONS[1], max_new_tokens=3)
        chat.ask(QUESTIONS[2], max_new_tokens=3)
    assert max(length for _, length in fed) < 60
    assert fed[0][0] == 3


def test_streamed_text_is_the_answer_under_autocast_too(book):
    with torch.autocast("cpu", torch.bfloat16):
        book = gracekv.compress(book.model, book.prompt, ratio=4)
        whole = book.ask(QUESTIONS[1], max_new_tokens=12)
        pieces = list(book.ask(QUESTIONS[1], max_new_tokens=12, stream=True))
    assert len(pieces) > 1
    assert "".join(pieces) == whole


def test_a_stream_that_is_left_open_ends_before_python_does(book, monkeypatch):
    ends = []
    monkeypatch.setattr("atexit.register", ends.append)
    pieces = book.ask("Who?", 400, stream=True, eos_token_id=1999)
    next(pieces)
    ends[0]()
    assert len("".join(pieces).split()) < 200


def test_an_error_inside_a_stream_is_raised(book):
    with pytest.raises(ConfigError, match="past_key_values: ids, mask and cache are those"):
        list(book.ask("Who?", stream=True, past_key_values=book.new_cache()))
    with pytest.raises(ConfigError, match="or a streamer"):
        list(book.ask("Who?", stream=True, streamer=object()))


def test_an_error_inside_a_stream_holds_nothing_once_it_is_handled(book):
    def failing(ids, scores):
        raise MemoryError

    seen, processors = weakref.ref(failing), LogitsProcessorList([failing])
    with contextlib.suppress(MemoryError):
        list(book.ask("Who?", stream=True, logits_processor=processors))
    del failing, processors
    assert seen() is None


def test_the_prompt_itself_can_still_be_continued(model, prompt, book, whole):
    assert book.generate_ids(4).shape == (1, 4)
    want, logits = steps(model, prompt.ids, whole.new_cache(), 6)
    same_greedy(whole.generate_ids(6, eos_token_id=1999)[0], want, logits)
    short = gracekv.Prompt.from_chat(prompt.tokenizer, context=TEXT[:300])
    rows = gracekv.compress(model, [prompt, short], ratio=4).generate_ids(4, eos_token_id=1999)
    want, logits = steps(model, prompt.ids, book.new_cache(), 4)
    same_greedy(rows[0], want, logits)


def test_a_base_model_is_asked_in_plain_text(model, tokenizer):
    plain = gracekv.Prompt.from_chat(tokenizer, context=TEXT, template=False, separator="\n")
    assert plain.spans.context_end == plain.spans.length
    chat = gracekv.compress(model, plain, ratio=2).chat()
    chat.ask("Who fell?", max_new_tokens=4)
    assert tokenizer.decode(chat._ids).startswith(TEXT + "\nWho fell?")


BAD_QUESTIONS = [
    ({"question": " \n"}, PromptError, "non-empty text; got ' "),
    ({"question": ["Who?", ""]}, PromptError, "non-empty text; got ''"),
    ({"question": []}, PromptError, "at least one; got an empty list"),
    ({"question": None}, PromptError, "at least one; got None"),
    ({"question": [3]}, PromptError, "non-empty text; got 3"),
    ({"question": np.array(["a", "b"])}, PromptError, "at least one; got array"),
    ({"question": "Who?", "max_new_tokens": True}, ConfigError, "at least 1; got True"),
    ({"question": "Who?", "num_return_sequences": 2}, ConfigError, "One text is returned"),
    ({"question": "Who?", "generation_config": SEVERAL}, ConfigError, "text .*sequences=2"),
    ({"question": "Who?", "generation_config": SHORT}, ConfigError, "length as max_new_tokens"),
    ({"question": "Who?", "max_new_tokens": "8"}, ConfigError, "at least 1; got '8'"),
    ({"question": "Who?", "max_new_tokens": 0}, ConfigError, "at least 1; got 0"),
    ({"question": "Who?", "limit": 512}, ConfigError, "Limit, such as Limit.*; got int"),
    ({"question": ["Who?"], "stream": True}, ConfigError, "one question as text"),
    ({"question": "Who?", "max_new_tokens": 4096}, PromptError, "max_new_tokens=.* or less"),
    ({"question": "Who? " * 4096}, PromptError, "a shorter question"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_QUESTIONS)
def test_bad_questions_are_refused(book, options, error, message):
    with pytest.raises(error, match=message):
        book.ask(**options)


def test_several_answers_by_the_models_own_setting_are_refused(model, book, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_return_sequences", 2)
    for question in ("Who?", ["Who?", "Where?"]):
        with pytest.raises(ConfigError, match="got num_return_sequences=2"):
            book.ask(question)


def test_a_generation_config_is_what_keywords_are(book):
    settings = {"do_sample": True, "temperature": 9.0, "top_k": 0}
    found = []
    for options in (settings, {"generation_config": GenerationConfig(**settings)}):
        torch.manual_seed(0)
        found.append(book.ask("Who?", max_new_tokens=12, **options))
    assert found[0] == found[1]
    assert found[0] != book.ask("Who?", max_new_tokens=12)
