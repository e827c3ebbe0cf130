"""Conversations about a context that was compressed once."""

import copy
import threading
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig

import gracekv
from gracekv.errors import BudgetError, CacheError, ConfigError, ObserverError, PromptError
from support.asked_context import TEXT, same_greedy, steps


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


@pytest.mark.parametrize("several", [list, torch.tensor])
def test_a_word_that_ends_an_answer_stays_in_it(tokenizer, book, several):
    with book.chat() as plain, book.chat() as chat:
        plain.ask("Who fell?", max_new_tokens=6)
        at = len(plain._ids) - 4
        end = {"max_new_tokens": 6, "eos_token_id": several([int(plain._ids[at]), 1999])}
        told = chat.ask("Who fell?", **end)
        assert told == "".join(book.ask("Who fell?", **end, stream=True))
        assert chat._ids.equal(plain._ids[: len(chat._ids)])
        assert int(chat._ids[-1]) == int(plain._ids[at])
        # No tools are no tools, however they are given.
        chat.send([*chat.messages, {"role": "user", "content": "Why?"}], 3, tools=[])


def test_a_recipe_that_keeps_everything_cannot_compress_turns(model, prompt):
    policy = gracekv.Compaction(after=64)
    for recipe, limit in (("fullkv", None), ("fullkv-8bit", gracekv.Limit(entries_per_head=600))):
        book = gracekv.compress(model, prompt, ratio=1, pipeline=recipe)
        with pytest.raises(ConfigError, match=r"keeps everything\. .* at ratio=1"):
            book.chat(limit, policy)
    assert book.chat(compact=policy).messages == []


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
            want, logits = steps(model, chat._ids[: len(chat._ids) - 6], book.new_cache(), 6)
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


def questions(count):
    return [f"Who fell, and what does the cat say of number {x}?" for x in range(count)]


def test_older_messages_are_compressed_by_themselves(model, book):
    """At ratio 1, only the place of the entries changes."""
    with book.chat(compact=gracekv.Compaction(after=64, ratio=1, recent=2)) as chat:
        for question in questions(6):
            spoken = "".join(chat.ask(question, max_new_tokens=12, eos_token_id=1999, stream=True))
            want, logits = steps(model, chat._ids[:-12], book.new_cache(), 12)
            same_greedy(chat._ids[-12:], want, logits)
            assert chat.messages[-1]["content"] == spoken
        assert chat._cache.packed_length > book.packed.length + 64
        assert len(chat.messages) == 12


def test_a_conversation_that_compresses_itself_grows_less(book):
    for given in (64, {"after": 64}):
        with pytest.raises(ConfigError, match=r"takes a gracekv\.Compaction.*got (int|dict)"):
            book.chat(compact=given)
    policy = gracekv.Compaction(after=64, ratio=4, recent=2)
    kept = gracekv.Compaction(after=64, ratio=4, recent=2, keep=("user",))
    held = []
    for compact in (policy, kept, None):
        with book.chat(compact=compact) as chat:
            for question in questions(6):
                chat.ask(question, max_new_tokens=32, eos_token_id=1999)
            held.append(chat.accounting.entries)
    assert held == sorted(held)
    assert len(set(held)) == 3


@pytest.mark.parametrize("pipeline", ["gracekv-agnostic-allocated", "snapkv-4bit"])
def test_what_is_kept_keeps_all_its_entries(model, prompt, pipeline):
    """32-bit numbers do not fit into the bytes that ratio 1 allows."""
    book = gracekv.compress(model, prompt, pipeline=pipeline, kv_bytes="40kB")
    policy = gracekv.Compaction(after=64, ratio=16, recent=0, keep=("user", "assistant"))
    with book.chat(compact=policy) as chat:
        for question in questions(4):
            chat.ask(question, max_new_tokens=12)
        result = chat._result
        added = result.prompt.spans.context_end - book.prompt.spans.context_end
        assert added > 64
        assert torch.equal(result.accounting.entries, book.accounting.entries + added)
        coded = [sum(x.entries for x in y.accounting.widths if x.bits < 16) for y in (result, book)]
        assert coded[0] == coded[1]


FAR = [
    (4, 4, None),
    (16, 4, None),
    (16, 16, None),
    (8, 4, torch.float64),
]


@pytest.mark.parametrize(("ratio", "minimum", "dtype"), FAR)
def test_older_messages_may_be_compressed_far(model, prompt, ratio, minimum, dtype):
    window = {"window": {"size": 32, "minimum": minimum}}
    if dtype is not None:
        model, window["precision"] = copy.deepcopy(model).to(dtype), "allocated"
    pipeline = gracekv.Pipeline.from_dict(window, base="gracekv-agnostic")
    book = gracekv.compress(model, prompt, ratio=4, pipeline=pipeline)
    with book.chat(compact=gracekv.Compaction(after=64, ratio=ratio, recent=0)) as chat:
        for question in questions(4):
            chat.ask(question, max_new_tokens=12)
        assert chat._result is not book


def test_a_compression_that_fails_is_told_once(book, monkeypatch):
    monkeypatch.setattr(type(book), "extend", Mock(side_effect=BudgetError("no room")))
    compact = gracekv.Compaction(after=64, recent=0)
    with book.chat(compact=compact) as chat, book.chat() as plain:
        for one in (chat, plain):
            one.ask("Who fell? " * 20, max_new_tokens=4)
        with pytest.raises(BudgetError, match="no room"):
            chat.ask("Why?")
        assert chat.ask("Why?", max_new_tokens=4) == plain.ask("Why?", max_new_tokens=4)
        assert chat.messages == plain.messages


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
        stream = chat.ask("And then?", max_new_tokens=64, stream=True)
        next(stream)
    stream.close()
    assert chat._cache.grace_layers[0].tail_length == 0
    with pytest.raises(CacheError, match="closed"):
        chat.ask("Why?")
    with book.chat() as other:
        assert other.ask("Who fell?", max_new_tokens=8) == spoken
        assert other.ask("Why?", max_new_tokens=6) == alone


def test_turns_that_a_limit_has_no_room_for_stay_as_they_are(book, monkeypatch):
    refuse = Mock(side_effect=BudgetError("325 must stay"))
    with book.chat() as chat:
        chat.ask("Who fell?", max_new_tokens=4)
        result, ids = chat._result, chat._ids
        with monkeypatch.context() as patch:
            patch.setattr(type(book), "new_cache", refuse)
            with pytest.raises(BudgetError, match="325 must stay"):
                chat.compress(ratio=1)
        assert chat._result is result
        assert torch.equal(chat._ids, ids)
        chat.compress(ratio=1)
        chat.ask("Why?", max_new_tokens=2)
        assert len(chat.messages) == 4


def test_bad_conversations_are_refused(model, tokenizer, prompt, book):
    chat = book.chat()
    with pytest.raises(ConfigError, match="num_beams=4"):
        chat.ask("Who?", num_beams=4)
    with pytest.raises(ConfigError, match="num_beams=3"):
        chat.ask("Who?", generation_config=GenerationConfig(num_beams=3))
    with pytest.raises(PromptError, match="Ask something first"):
        chat.compress(ratio=2)
    chat.close()
    with pytest.raises(CacheError, match=r"closed.*result\.chat\(\)"):
        chat.compress(ratio=2)
    for stream in (False, True):
        with pytest.raises(CacheError, match=r"closed.*result\.chat\(\)"):
            chat.ask("Who?", stream=stream)
    own = gracekv.Prompt.from_chat(tokenizer, context=TEXT, question="Who?")
    result = gracekv.compress(model, own, ratio=4)
    for call in (result.chat, lambda: result.ask("Who?")):
        with pytest.raises(PromptError, match="a question of its own"):
            call()
    twice = gracekv.compress(model, prompt, ratio=4, pipeline="kvzip-two-pass")
    with pytest.raises(ObserverError, match="reads passes, but a passage"):
        twice.chat(compact=gracekv.Compaction())


def test_two_threads_do_not_share_a_conversation(model, book):
    entered, leave = threading.Event(), threading.Event()
    chat = book.chat()

    def wait(*_):
        entered.set()
        leave.wait(30)

    hook = model.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: chat.ask("Who fell?", max_new_tokens=1))
    thread.start()
    entered.wait(30)
    try:
        with pytest.raises(CacheError, match="in another thread"):
            chat.ask("Why?")
    finally:
        leave.set()
        hook.remove()
        thread.join()
    assert len(chat.messages) == 2


def test_a_template_that_hides_answers_is_refused(tokenizer, book, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    chat = book.chat()
    chat.ask("Who fell?", max_new_tokens=2)
    with pytest.raises(PromptError, match="chat template does not show"):
        chat.ask("Why?")
