"""A conversation survives a stream that ends while its thread still writes to the cache."""

import copy
import os
import pickle
import signal
import threading

import pytest

from gracekv.errors import CacheError, ConfigError
from gracekv.hf import generation

OPTIONS = {"max_new_tokens": 40, "eos_token_id": 1999, "stream": True}


class Between:
    """A logits processor that runs `act` once, between two steps of the answering thread."""

    def __init__(self, act):
        self.act, self.ready, self.done = act, threading.Event(), threading.Event()
        self.steps = 0

    def __call__(self, ids, scores):
        self.steps += 1
        # The first piece of text may take some tokens.
        if self.steps > 20:
            self.ready.wait(60)
        if self.ready.is_set() and not self.done.is_set():
            self.act()
            self.done.set()
        return scores


def begun(book):
    chat = book.chat()
    chat.ask("Who fell?", 6)
    return chat


def goes_on(chat, book):
    """Answers, messages and length of the chat, and of one that was never interrupted."""
    plain = begun(book)
    return [(x.ask("Why?", 6), x.messages, x._cache.get_seq_length()) for x in (chat, plain)]


def test_a_stream_that_its_own_thread_closes(book):
    # As garbage collection in it may do, after a server has dropped the iterator.
    chat, failures = begun(book), []

    def close():
        try:
            stream.close()
        except BaseException as error:
            failures.append(error)

    between = Between(close)
    stream = chat.ask("And then?", logits_processor=[between], **OPTIONS)
    assert next(stream)
    between.ready.set()
    assert between.done.wait(60)
    assert not failures
    assert not chat._lock.locked()
    here, there = goes_on(chat, book)
    assert here == there
    assert len({layer.logical_length for layer in chat._cache.grace_layers}) == 1


def test_a_stream_that_is_interrupted_while_it_waits_for_its_thread(book, monkeypatch):
    chat, more, waits = begun(book), threading.Event(), []
    between = Between(lambda: more.wait(60))

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            if between.ready.is_set() and not waits:
                waits.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    stream = chat.ask("And then?", logits_processor=[between], **OPTIONS)
    monkeypatch.setattr(generation.threading, "Event", Interrupted)
    assert next(stream)
    monkeypatch.undo()
    between.ready.set()
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    held = chat._cache
    more.set()
    assert waits[0].wait(60)
    assert chat._cache is held
    here, there = goes_on(chat, book)
    assert here == there


def test_a_stream_that_never_starts_leaves_the_turns_where_they_are(book):
    chat = begun(book)
    before = chat._cache.get_seq_length()
    with pytest.raises(ConfigError, match="stream=True"):
        next(chat.ask("And then?", streamer=object(), **OPTIONS))
    assert chat._cache.get_seq_length() == before


def test_a_forked_process_ends_though_its_parent_streams(book):
    stream = book.ask("Who fell?", logits_processor=[between := Between(lambda: None)], **OPTIONS)
    assert next(stream)
    if not (child := os.fork()):
        signal.alarm(60)
        code = 1
        try:
            stream.close()
            code = 7
        finally:
            os._exit(code)
    between.ready.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    list(stream)


def test_a_conversation_is_not_copied(book):
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CacheError, match=r"cannot be copied or pickled.*result\.chat\(\)"):
            refused(book.chat())
