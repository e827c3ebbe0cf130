"""A context that is compressed once and asked later: one question, many, and conversations."""

import threading
from importlib.resources import files

import pytest
import torch

from support.margins import assert_same_tokens

pytest.importorskip("transformers")

import gracekv
from gracekv import recipes
from gracekv.errors import CacheError, ConfigError, PromptError
from gracekv.testing.models import tiny_llama
from gracekv.testing.tokenizers import tiny_tokenizer

TEXT = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")[:900]
QUESTIONS = ["Who fell?", "Where is Alice sitting, and what does she see first of all?", "Why?"]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=3, vocabulary=2000, positions=4096)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(vocabulary=2000)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return gracekv.Prompt.from_chat(tokenizer, context=TEXT, instruction="Read.")


@pytest.fixture(scope="module")
def book(model, prompt):
    return gracekv.compress(model, prompt, ratio=4)


@pytest.fixture(scope="module")
def whole(model, prompt):
    return gracekv.compress(model, prompt, ratio=1)


def asked(tokenizer, question):
    """What `from_chat` makes of the same texts: the ids of context and question."""
    return gracekv.Prompt.from_chat(
        tokenizer, context=TEXT, instruction="Read.", question=question
    ).ids


def steps(model, ids, cache, count):
    """Greedy ids after `ids` [T], one forward pass a token, and the logits that chose them."""
    fed, chosen, logits = ids[cache.get_seq_length() :], [], []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(fed[None], past_key_values=cache).logits[0, -1])
            chosen.append(int(logits[-1].argmax()))
            fed = torch.tensor(chosen[-1:])
    return torch.tensor(chosen), torch.stack(logits)


def same_greedy(got, want, logits):
    """Equal, or the first other token is as likely within the margin."""
    assert_same_tokens(got, want, lambda tokens: logits[len(tokens)])


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
    gracekv.hf.detach(model)
    ids, logits, want = asked(tokenizer, question), [], []
    with torch.no_grad():
        for _ in range(8):
            logits.append(model(ids[None]).logits[0, -1])
            want.append(int(logits[-1].argmax()))
            ids = torch.cat([ids, torch.tensor(want[-1:])])
    same_greedy(got, torch.tensor(want), torch.stack(logits))


def test_questions_of_any_lengths_are_answered_together(model, tokenizer, book):
    rows = gracekv.hf.questions.ask_ids(book, QUESTIONS, 8, {"eos_token_id": 1999})
    for row, question in zip(rows, QUESTIONS, strict=True):
        want, logits = steps(model, asked(tokenizer, question), book.new_cache(), 8)
        same_greedy(row, want, logits)
    assert len(book.ask(QUESTIONS, max_new_tokens=4)) == 3
    assert book.ask([QUESTIONS[0]], max_new_tokens=4) == [book.ask(QUESTIONS[0], max_new_tokens=4)]


def test_the_context_is_never_read_again(model, book):
    fed = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        book.ask(QUESTIONS, max_new_tokens=3, eos_token_id=1999)
        with book.chat() as chat:
            chat.ask(QUESTIONS[1], max_new_tokens=3)
            chat.ask(QUESTIONS[2], max_new_tokens=3)
    finally:
        hook.remove()
    assert max(length for _, length in fed) < 60
    assert fed[0][0] == 3


def test_streamed_text_is_the_answer(book):
    whole = book.ask(QUESTIONS[1], max_new_tokens=12)
    pieces = list(book.ask(QUESTIONS[1], max_new_tokens=12, stream=True))
    assert len(pieces) > 1
    assert "".join(pieces) == whole


def test_an_error_inside_a_stream_is_raised(book):
    with pytest.raises(ConfigError, match="past_key_values are those of the compressed prompt"):
        list(book.ask("Who?", stream=True, past_key_values=book.new_cache()))
    with pytest.raises(ConfigError, match="or a streamer"):
        list(book.ask("Who?", stream=True, streamer=object()))


def test_a_conversation_appends_its_turns(model, tokenizer, book):
    with book.chat() as chat:
        first = chat.ask("Who fell?", max_new_tokens=6)
        ids, cache = chat._ids, chat._cache.get_seq_length()
        assert cache == len(ids) - 1
        second = chat.ask("Why?", max_new_tokens=6)
        assert [turn["content"] for turn in chat.messages] == ["Who fell?", first, "Why?", second]
        assert [turn["role"] for turn in chat.messages] == ["user", "assistant"] * 2
        turn = tokenizer("<|end|><|user|>Why?<|end|><|assistant|>", add_special_tokens=False)
        by_hand = torch.cat([ids, torch.tensor(turn["input_ids"])])
        want, logits = steps(model, by_hand, book.new_cache(), 6)
        same_greedy(chat._ids[len(by_hand) :], want, logits)
        assert repr(chat).startswith("Conversation(2 turns, ")


def test_turns_are_compressed_behind_the_context(model, tokenizer, book):
    with book.chat() as chat, book.chat() as plain:
        for one in (chat, plain):
            one.ask("Who fell?", max_new_tokens=9, eos_token_id=1999)
        turns = len(chat._ids) - book.packed.length
        chat.compress(ratio=1)
        assert chat._cache.packed_length == book.packed.length + turns
        for question in ("Why?", "And then?"):
            for one in (chat, plain):
                one.ask(question, max_new_tokens=6, eos_token_id=1999)
            by_hand = chat._ids[: len(chat._ids) - 6]
            want, logits = steps(model, by_hand, book.new_cache(), 6)
            same_greedy(chat._ids[-6:], want, logits)
        assert [turn["role"] for turn in chat.messages] == ["user", "assistant"] * 3
        before = chat._cache.packed_length
        chat.compress(ratio=2)
        units, added = book.accounting.entries.numel(), chat._cache.packed_length - before
        assert chat._result.accounting.budget == (
            book.accounting.budget + units * turns + units * added // 2
        )
        chat.ask("Why?", max_new_tokens=3)
        assert len(chat.messages) == 8
    assert book.packed.length == book.prompt.spans.context_end


def test_a_streamed_turn_counts_when_it_is_read_to_its_end(book):
    with book.chat() as chat:
        spoken = "".join(chat.ask("Who fell?", max_new_tokens=8, stream=True))
        assert chat.messages[1]["content"] == spoken
        length = chat._cache.get_seq_length()
        stream = chat.ask("Why?", max_new_tokens=64, stream=True)
        next(stream)
        for call in (lambda: chat.ask("And then?"), lambda: chat.compress(ratio=2)):
            with pytest.raises(CacheError, match="open stream"):
                call()
        stream.close()
        assert len(chat.messages) == 2
        assert chat._cache.get_seq_length() == length
        alone = chat.ask("Why?", max_new_tokens=6)
    with book.chat() as other:
        assert other.ask("Who fell?", max_new_tokens=8) == spoken
        assert other.ask("Why?", max_new_tokens=6) == alone


def test_a_turn_that_fails_is_undone(model, book):
    layer = model.model.layers[1]
    with book.chat() as chat:
        chat.ask("Who fell?", max_new_tokens=4)
        before = [x.logical_length for x in chat._cache.layers]

        def fail(*_):
            raise RuntimeError("in the middle")

        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            chat.ask("Why?")
        hook.remove()
        assert [x.logical_length for x in chat._cache.layers] == before
        assert chat.ask("Why?", max_new_tokens=4) == chat.messages[-1]["content"]


def test_saved_books_can_be_asked(model, tokenizer, book, tmp_path):
    book.save(tmp_path / "book.gracekv")
    again = gracekv.load(tmp_path / "book.gracekv", model, tokenizer=tokenizer)
    assert again.ask(QUESTIONS, max_new_tokens=6) == book.ask(QUESTIONS, max_new_tokens=6)
    with again.chat() as chat:
        assert chat.ask(QUESTIONS[0], max_new_tokens=6) == book.ask(QUESTIONS[0], max_new_tokens=6)
    bare = gracekv.load(tmp_path / "book.gracekv", model)
    with pytest.raises(PromptError, match="need a tokenizer"):
        bare.ask("Who?")


def test_the_prompt_itself_can_still_be_continued(model, prompt, book, whole):
    assert book.generate_ids(4).shape == (1, 4)
    want, logits = steps(model, prompt.ids, whole.new_cache(), 6)
    same_greedy(whole.generate_ids(6, eos_token_id=1999)[0], want, logits)
    pair = gracekv.compress(
        model,
        [prompt, gracekv.Prompt.from_chat(prompt.tokenizer, context=TEXT[:300])],
        ratio=4,
    )
    rows = pair.generate_ids(4, eos_token_id=1999)
    want, logits = steps(model, prompt.ids, book.new_cache(), 4)
    same_greedy(rows[0], want, logits)


def test_a_base_model_is_asked_in_plain_text(model, tokenizer):
    plain = gracekv.Prompt.from_chat(tokenizer, context=TEXT, template=False, separator="\n")
    assert plain.spans.context_end == plain.spans.length
    book = gracekv.compress(model, plain, ratio=2)
    chat = book.chat()
    chat.ask("Who fell?", max_new_tokens=4)
    assert tokenizer.decode(chat._ids).startswith(TEXT + "\nWho fell?")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"question": " \n"}, PromptError, "not empty; got ' "),
        ({"question": ["Who?", ""]}, PromptError, "not empty; got ''"),
        ({"question": []}, PromptError, "at least one; got an empty list"),
        ({"question": [3]}, PromptError, "not empty; got 3"),
        ({"question": "Who?", "num_return_sequences": 2}, ConfigError, "One text is returned"),
        ({"question": ["Who?"], "stream": True}, ConfigError, "one question, a text"),
        ({"question": "Who?", "max_new_tokens": 4096}, PromptError, "max_new_tokens=.* or less"),
        ({"question": "Who? " * 4096}, PromptError, "a shorter question"),
    ],
)
def test_bad_questions_are_refused(book, options, error, message):
    with pytest.raises(error, match=message):
        book.ask(**options)


def test_bad_conversations_are_refused(model, tokenizer, prompt, book):
    chat = book.chat()
    with pytest.raises(ConfigError, match="num_beams=4"):
        chat.ask("Who?", num_beams=4)
    with pytest.raises(PromptError, match="Ask something first"):
        chat.compress(ratio=2)
    chat.close()
    with pytest.raises(CacheError, match=r"closed.*result\.chat\(\)"):
        chat.compress(ratio=2)
    for stream in (False, True):
        with pytest.raises(CacheError, match=r"closed.*result\.chat\(\)"):
            chat.ask("Who?", stream=stream)
    batch = gracekv.compress(model, [prompt, prompt], ratio=4)
    for call in (batch.ask, batch.chat):
        with pytest.raises(PromptError, match="several contexts"):
            call("Who?")
    own = gracekv.Prompt.from_chat(tokenizer, context=TEXT, question="Who?")
    result = gracekv.compress(model, own, ratio=4)
    for call in (result.chat, lambda: result.ask("Who?")):
        with pytest.raises(PromptError, match="a question of its own"):
            call()


def test_two_threads_do_not_share_a_conversation(model, book):
    entered, leave, errors = threading.Event(), threading.Event(), []
    chat = book.chat()

    def wait(*_):
        entered.set()
        leave.wait(30)

    hook = model.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: chat.ask("Who fell?", max_new_tokens=1))
    thread.start()
    entered.wait(30)
    try:
        chat.ask("Why?")
    except CacheError as error:
        errors.append(str(error))
    finally:
        leave.set()
        hook.remove()
        thread.join()
    assert "in another thread" in errors[0]
    assert len(chat.messages) == 2


def test_a_template_that_hides_answers_is_refused(model, tokenizer, book):
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[-1]['content'] }}"
    try:
        chat = book.chat()
        chat.ask("Who fell?", max_new_tokens=2)
        with pytest.raises(PromptError, match="chat template does not show"):
            chat.ask("Why?")
    finally:
        tokenizer.chat_template = template
