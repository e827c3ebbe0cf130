"""`Client` with a stand-in for vLLM's server: what is sent, returned and raised."""

import dataclasses
import pickle
import sys
from copy import deepcopy
from fractions import Fraction
from unittest.mock import patch

import pytest

pytest.importorskip("openai")

import numpy as np
import openai

import gracekv
from gracekv import Compaction, Limit
from gracekv.errors import MissingDependencyError, PromptError, StoreError
from gracekv.vllm import Client, Context, document, request
from gracekv.vllm.requests import split_document
from support.context_server import MODEL, QUESTION, TEXT, context_server, extensions


def test_a_document_becomes_a_context(client, server, tokenizer):
    made = client.compress("book", TEXT, ratio=np.int64(4), save=True)
    ids = document(tokenizer, TEXT)
    facts = ("book", "ready", len(ids), 1200, 614400, 4.0, 0.5, "gracekv-agnostic")
    assert made == Context(*facts, saved=True)
    assert client.list() == (made,)
    order = {"compress": {"name": "book", "ratio": 4, "save": True}}
    plain = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
    assert server.bodies[0] == plain | {"kv_transfer_params": {"gracekv": order}}
    assert server.bodies[1]["kv_transfer_params"] == {"gracekv": {"list": "book"}}


def test_a_document_may_end_like_a_turn(client, server, tokenizer):
    text = f"{TEXT}<|end|><|assistant|>"
    client.compress("log", text, ratio=4)
    ids = document(tokenizer, text)
    assert split_document(tokenizer, ids)[0] != ids
    assert split_document(tokenizer, server.bodies[0]["prompt"])[0] == ids


def test_a_stream_that_is_left_early_is_closed(client, server):
    client.compress("book", TEXT, ratio=4)
    for stream in (client.stream("book", QUESTION), client.chat("book").stream(QUESTION)):
        with patch.object(openai.Stream, "close") as closed:
            next(stream)
            stream.close()
        closed.assert_called_once()


def test_ids_are_taken_as_they_are(client, server):
    client.compress("book", range(5, 9), ratio=Fraction(5, 2), recipe="knorm")
    assert server.bodies[0]["prompt"] == [5, 6, 7, 8]
    client.compress("array", range(5, 9), ratio=np.array(2.5))
    orders = (x["kv_transfer_params"]["gracekv"].get("compress") for x in server.bodies)
    assert [x["ratio"] for x in orders if x] == ["5/2", 2.5]
    with pytest.raises(StoreError):
        client.compress("none", range(5, 9), ratio=float("nan"))
    assert server.bodies[-1]["kv_transfer_params"]["gracekv"]["compress"]["ratio"] == "NaN"


def test_a_passage_extends_a_context(client, server, tokenizer):
    with pytest.raises(StoreError, match="There is no context 'talk'"):
        client.extend("talk", TEXT, ratio=4)
    client.compress("talk", TEXT, ratio=4)
    made = client.extend("talk", " And so on.", ratio=2, save=True)
    assert (made.state, made.ratio, made.saved) == ("ready", 2.0, True)
    sent = [body for body in server.bodies if "extend" in body["kv_transfer_params"]["gracekv"]]
    want = gracekv.Prompt.from_chat(tokenizer, context=TEXT).extended(" And so on.")
    passage = want.ids[len(document(tokenizer, TEXT)) : want.spans.context_end]
    assert sent[-1]["prompt"] == passage.tolist()
    assert sent[-1]["kv_transfer_params"]["gracekv_exact"]
    made = client.extend("talk", [5, 6, 7], ratio=2, wait=False)
    assert (made.name, made.state, made.entries) == ("talk", "compressing", None)
    for empty in ("", []):
        with pytest.raises(PromptError, match="passage is empty"):
            client.extend("talk", empty, ratio=2)
    server.refusing = 504
    with pytest.raises(openai.InternalServerError):
        client.extend("talk", "And so on.", ratio=2)
    assert len(extensions(server)) == 4


def test_an_answer_at_once_or_in_pieces(client, server, tokenizer):
    client.compress("book", TEXT, ratio=4)
    assert client.ask("book", QUESTION, max_tokens=9, top_k=3) == f"book: {QUESTION}"
    asked = server.bodies[-1]
    assert asked["prompt"] == list(request(None, "book", QUESTION, tokenizer).prompt_ids)
    assert (asked["max_tokens"], asked["temperature"], asked["top_k"]) == (9, 0.0, 3)
    assert asked["kv_transfer_params"] == {"gracekv": "book"}
    pieces = list(client.stream("book", QUESTION, temperature=0.5))
    assert pieces == ["book:", *(f" {word}" for word in QUESTION.split())]
    assert server.bodies[-1]["temperature"] == 0.5


def test_a_context_that_is_deleted_is_gone(client):
    client.compress("book", TEXT, ratio=4)
    client.delete("book")
    assert client.list() == ()
    for asking in (
        lambda: client.delete("book"),
        lambda: client.ask("book", QUESTION),
        lambda: list(client.stream("book", QUESTION)),
    ):
        with pytest.raises(StoreError, match=r"^There is no context 'book'\.$"):
            asking()


REFUSED = {
    "A ratio is at least 1; got 0.5": lambda x: x.compress("book", TEXT, ratio=0.5),
    "'speed': 3": lambda x: x.compress("book", TEXT, ratio=4, speed=3),
    "'bad' is failed. Its document has one token.": lambda x: x.compress("bad", TEXT, ratio=4),
    "The context is empty": lambda x: x.compress("book", " ", ratio=4),
    "must be token ids of one sequence": lambda x: x.compress("book", None, ratio=4),
    "needs the tokenizer": lambda x: request(None, "book", QUESTION),
    "leave out n and best_of": lambda x: list(x.stream("book", QUESTION, n=2)),
    "leave out echo": lambda x: x.chat("book").ask("Who?", echo=True),
    "the name of a context; got int": lambda x: x.chat(5),
    "the number of messages": lambda x: x.chat("book", messages=[]),
    "no new message": lambda x: x.chat("book", messages=1).send([]),
    "limit takes a gracekv.Limit": lambda x: x.extend("book", TEXT, limit={"ratio": 2}),
    "(entries_per_head=512); got Compaction": lambda x: x.chat("book", Compaction()),
    "compact takes a gracekv.Compaction": lambda x: x.chat("book", compact={"after": 64}),
    "also pass compact": lambda x: x.chat("book", Limit(ratio=2)),
    "no strategy and no": lambda x: x.chat("book", Limit(ratio=2, history=True), Compaction()),
    "Leave stream out": lambda x: x.ask("book", QUESTION, stream=True),
    "On a server the length": lambda x: x.ask("book", QUESTION, max_new_tokens=9),
    "is max_tokens; got": lambda x: list(x.stream("book", QUESTION, max_new_tokens=9)),
    "got max_new_tokens.": lambda x: x.chat("book").ask(QUESTION, max_new_tokens=9),
    "`stream` iterates": lambda x: list(x.stream("book", QUESTION, stream=True)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_reason_is_told(client, reason):
    with pytest.raises(gracekv.errors.GracekvError) as caught:
        REFUSED[reason](client)
    assert reason in str(caught.value)


def test_a_context_that_takes_too_long(tokenizer):
    with context_server(tokenizer, looks=10**9) as slow:
        hasty = Client(slow.url, timeout=0.3)
        with pytest.raises(StoreError, match=r"'book' is compressing. Wait longer than 0\.3 s"):
            hasty.compress("book", TEXT, ratio=4)


def test_a_server_without_contexts(client, server):
    server.connector = False
    with pytest.raises(StoreError, match="has no store of contexts"):
        client.list()


def test_what_a_stopping_server_cuts_short_is_no_answer(client, server):
    client.compress("book", TEXT, ratio=4)
    chat, server.ended = client.chat("book"), "abort"
    streams = lambda: list(client.stream("book", QUESTION)), lambda: chat.ask(QUESTION)
    whole = lambda: client.ask("book", QUESTION), lambda: client.compress("book", TEXT, ratio=4)
    for asking in (*streams, *whole):
        with pytest.raises(StoreError, match="stopped or paused and cut this request short"):
            asking()
    server.ended = None
    for asking in streams:
        with pytest.raises(StoreError, match="connection ended before the answer did"):
            asking()
    assert chat.messages == []


def test_other_errors_are_openai_s(tokenizer):
    with context_server(tokenizer) as gone:
        lost = Client(gone.url, MODEL, tokenizer)
    server = lost._server
    server.__dict__["_openai"] = server._openai.with_options(max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        lost.ask("book", QUESTION)
    chat = lost.chat("book")
    chat._own.append("chat-1")
    with pytest.raises(ZeroDivisionError), chat:  # not that of the context that cannot be deleted
        _ = 1 / 0
    with pytest.raises(openai.APIConnectionError), chat:
        pass


def test_what_is_given_is_not_asked_for(server, tokenizer):
    client = Client(server.url, "mine", tokenizer, api_key="secret")
    client.compress("book", TEXT, ratio=4, wait=False)
    assert server.bodies[0]["model"] == "mine"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert client._server.tokenizer is tokenizer


def test_clients_and_contexts_are_values(server):
    for value in (Client(server.url), Context("book", "ready")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = value.url = "other"
    client = Client(server.url, api_key="secret")
    assert client._server._openai is not None
    assert pickle.loads(pickle.dumps(client)) == deepcopy(client) == client
    assert "secret" not in repr(client)


def test_openai_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependencyError, match=r"'openai'.*gracekv\[vllm\]"):
        Client().list()
