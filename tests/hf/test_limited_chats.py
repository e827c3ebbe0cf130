"""Conversations and questions within a limit."""

import pytest
import torch

import gracekv
from gracekv import Limit
from gracekv.decode import Fitted
from gracekv.decode.cut import kept_entries
from gracekv.hf import limited
from gracekv.hf.extend import limited_run
from gracekv.hf.limited import LimitedLayer
from gracekv.hf.questions import ask_ids
from support.margins import assert_same_tokens
from support.prompts import WORDS, words_book


def test_a_chat_stays_within_its_bytes_however_long_it_gets(monkeypatch):
    book = words_book(8192, 1, "fullkv")
    size = book.packed.kv_bytes * 2
    chat = book.chat(Limit(kv_bytes=size, every=16, window=8))
    for turn in range(8):
        chat.ask(f"word{turn} {WORDS[: 60 * turn + 5]}", max_new_tokens=8)
        assert chat.accounting.most_bytes <= size
    assert chat._cache.cuts > 5
    before, ids = chat._cache.get_seq_length(), chat._ids.clone()
    with pytest.raises(ZeroDivisionError):
        chat.ask(WORDS, max_new_tokens=20, stopping_criteria=[lambda *_, **__: 1 / 0])
    assert torch.equal(chat._ids, ids)
    # The turn was cut, so the conversation is read again.
    assert chat._cache.get_seq_length() <= before
    assert isinstance(chat.ask("word3", max_new_tokens=8), str)
    assert chat.accounting.most_bytes <= size
    left = [1, 0]
    monkeypatch.setattr(LimitedLayer, "reset", lambda *_: 1 // left.pop(0))
    with pytest.raises(ZeroDivisionError):
        chat.ask(WORDS, max_new_tokens=20)
    monkeypatch.undo()
    assert len({layer.logical_length for layer in chat._cache.grace_layers}) == 1
    assert isinstance(chat.ask("word4", max_new_tokens=8), str)


def test_turns_of_which_only_a_recent_window_is_kept_can_be_cut():
    policy = gracekv.Compaction(after=64, ratio=4)
    with words_book(4096, 4, "snapkv").chat(Limit(entries_per_head=160, every=64), policy) as chat:
        for turn in range(9):
            chat.ask(f"word{turn} {WORDS[:180]}", max_new_tokens=4)
        assert chat._result.packed.entries().float().mean() <= 160


def test_what_a_conversation_compresses_stays_within_its_limit():
    """Once it is reached, the entries with the highest scores stay, whatever their message."""
    limit = Limit(entries_per_head=150, every=192, window=8, positions="closed")
    held = []
    with words_book(512, 2).chat(limit, gracekv.Compaction(after=64, ratio=2)) as chat:
        for turn in range(24):
            before = chat._result
            chat.ask(f"word{turn} {WORDS[:120]}", max_new_tokens=4)
            packed = chat._result.packed
            held.append(int(packed.entries().sum()))
            scores = chat._result.runs[0].entry_scores()
            if chat._result is not before:
                assert [len(x) for x in scores] == [len(x.positions) for x in packed.layers]
                assert packed.length == chat._result.prompt.spans.context_end
        assert chat._cache.cuts == 0
        prefix = 4 * chat._result.prompt.spans.context_start
        assert chat._result.accounting.spent == held[-1] - prefix
        assert all(int(x.positions.min()) > packed.length - 512 for x in packed.layers)
        assert len(chat._ids) > 1024
    assert held == sorted(held)
    assert len(set(held)) > 2
    assert max(held) == 4 * (150 - 8)


def test_a_message_of_half_of_the_positions_is_compressed():
    """So is the token after it."""
    limit = Limit(entries_per_head=100, every=384, window=8, positions="closed")
    with words_book(512, 4).chat(limit, gracekv.Compaction(after=64, ratio=8)) as chat:
        while len(chat._ids) < 700:
            chat.ask(f"word5 {WORDS[:120]}", max_new_tokens=4)
        chat.ask(" ".join((WORDS.split() * 3)[:150]), max_new_tokens=4)
        for turn in range(3):
            chat.ask(f"word{turn}", max_new_tokens=4)


def test_bytes_are_those_that_dequantised_entries_take():
    kept = limited_run(words_book(512, 2, "gracekv-agnostic-allocated"), Limit(ratio=2)).accounting
    assert kept.spent_bytes == kept.spent * 2 * 16 * 4


def test_a_conversation_that_no_cut_reaches_goes_on_beyond_the_positions():
    """Room for a run of messages is made before it is read."""
    limit = Limit(entries_per_head=300, every=192, window=8, positions="closed")
    with words_book(512, 4).chat(limit, gracekv.Compaction(after=64, ratio=8)) as chat:
        while len(chat._ids) < 1400:
            chat.ask(f"word5 {WORDS[:120]}", max_new_tokens=4)
            layers = chat._result.packed.layers
            # Nothing was cut, and half of the positions remain in use.
            assert len(chat._ids) < 600 or min(len(x.positions) for x in layers) > 40
            assert all(int(x.positions.min()) > len(chat._ids) - 512 for x in layers)
        assert chat._cache.cuts == 0
        assert all(len(chat._ids) - int(x.positions.min()) > 256 for x in layers)


@pytest.mark.filterwarnings("ignore::gracekv.errors.LengthWarning")
def test_a_context_beyond_the_positions_goes_on_by_itself():
    book = words_book(64, 4, capture=gracekv.CaptureOptions(beyond_positions=True))
    chat = book.chat(compact=gracekv.Compaction(after=32, ratio=2, recent=0))
    for turn in range(4):
        chat.ask(f"word{turn} and{turn} word4 and5 word7", max_new_tokens=8)
    assert chat._result is not book


def test_a_row_that_was_asked_nothing_yet_keeps_its_prefix_in_a_cut(monkeypatch):
    seen = []

    def noted(layers, held, *rest):
        first = held(0)
        seen.append((first.moved.shape[2] > 0, bool(first.carried.isinf().any())))
        return kept_entries(layers, held, *rest)

    monkeypatch.setattr(limited, "kept_entries", noted)
    book = words_book(8192, 1.25)
    rule = Fitted(keep_prompt=False)
    limit = Limit(entries_per_head=book.packed.length // 2, every=16, window=2, strategy=rule)
    book.ask(["word1", "word2 and3 word4 and5 word7 " * 4], max_new_tokens=4, limit=limit)
    # First the shared context, then the short question's row, which is only padding so far.
    assert seen[:2] == [(False, True), (False, True)]
    assert (True, False) in seen


def test_several_questions_are_answered_within_the_limit():
    book = words_book(8192, 2)
    limit = Limit(entries_per_head=book.packed.length + 10, every=16, window=8, strategy="recent")
    questions, options = ["word1", "word2 and3 word4 and5 word7"], {"eos_token_id": None}
    for row, question in zip(ask_ids(book, questions, 60, options, limit), questions, strict=True):
        scores = []
        seen = [lambda ids, logits, kept=scores: kept.append(logits) or logits]
        alone = ask_ids(book, [question], 60, {**options, "logits_processor": seen}, limit)
        assert_same_tokens(row, alone, lambda before, kept=scores: kept[len(before)])
