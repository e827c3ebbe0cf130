"""Conversations on a stand-in for vLLM's server: what is sent, compressed and refused."""

import contextlib
from itertools import chain

import pytest

pytest.importorskip("openai")


import gracekv
from gracekv import Compaction, Limit
from gracekv.errors import CacheError, ConfigError, EditedHistoryError, PromptError, StoreError
from gracekv.prefill.chat_text import continued
from gracekv.prefill.history import History
from gracekv.prefill.messages import turn_ids
from gracekv.vllm import Client
from support.context_server import QUESTION, TEXT, context_server, extensions


@pytest.fixture
def client(client):
    """A client with the context that conversations are about."""
    client.compress("book", TEXT, ratio=4)
    return client


def talk(client, server, turns, limit=None, **policy):
    """A conversation of `turns` turns, and the prompts that it sent, by context."""
    chat = client.chat("book", limit, Compaction(after=64, ratio=4, recent=2, **policy))
    for number in range(turns):
        chat.ask(f"{QUESTION} It is question {number}.")
    asked = [body for body in server.bodies if body.get("stream")]
    return chat, [(x["kv_transfer_params"]["gracekv"], x["prompt"]) for x in asked]


def test_a_conversation_sends_what_is_not_compressed(client, server, tokenizer):
    plain = client.chat("book")
    for number in range(9):
        plain.ask(f"{QUESTION} It is question {number}.")
    whole = server.bodies[-1]["prompt"]
    chat, sent = talk(client, server, 9)
    assert [x["role"] for x in chat.messages] == ["user", "assistant"] * 9
    made = extensions(server)
    assert len(made) >= 2
    # Compressed and sent tokens are the whole conversation, each token once.
    name = sent[-1][0]
    assert name.startswith("book.chat-")
    assert compressed(server, name) + sent[-1][1] == whole_of(chat, tokenizer)
    assert len(sent[-1][1]) < len(whole)
    assert all(order["ratio"] == 4 for order, _ in made)
    # Each version extends the previous one, and only the newest stays.
    assert [order["name"] for order, _ in made] == ["book", *(o["into"] for o, _ in made[:-1])]
    assert {x.name for x in client.list()} == {"book", chat.context, made[-1][0]["into"]}
    with chat:
        pass
    assert [x.name for x in client.list()] == ["book"]


def compressed(server, name):
    """Ids of the messages in a conversation's context."""
    made = {order["into"]: (order["name"], ids) for order, ids in extensions(server)}
    return compressed(server, made[name][0]) + made[name][1] if name in made else []


def whole_of(chat, tokenizer):
    """Ids of a conversation up to its last answer."""
    ids = []
    for number, message in enumerate(chat.messages[:-1]):
        if message["role"] == "assistant":
            ids += continued(tokenizer, message["content"])
        else:
            after = "answer" if number else "context"
            ids += turn_ids(tokenizer, [message], "\n\n", True, after=after)[0]
    return ids


def test_the_token_that_ends_an_answer_is_in_no_turn(client, server, tokenizer):
    chat, server.told = client.chat("book"), {"token_ids": [7, 9], "stop_reason": 9}
    chat.ask(QUESTION)
    # Of the ids 7 and 9 with each of four words, the last 9 is not included.
    assert chat._history.tail[-1] == ("assistant", 7)
    assert chat._history.ids[-7:] == (7, 9, 7, 9, 7, 9, 7)
    # A stop string is not part of the text, but of the tokens.
    server.told["stop_reason"] = "\nUser:"
    text = chat.ask(QUESTION)
    added = continued(tokenizer, text)
    assert chat._history.tail[-1] == ("assistant", len(added))
    assert chat._history.ids[-len(added) :] == (*added,)


def test_a_stream_that_is_left_sends_no_message_twice(client, server, tokenizer):
    chat, _ = talk(client, server, 4)
    assert chat._pending is not None
    first, left = chat.stream("Why?"), chat.stream("And?")
    next(first)
    # The second stream takes over the context that is ready.
    next(left)
    left.close()
    assert "".join(first)
    answer = chat._history.tail[-1][1]
    sent = [*compressed(server, chat.context), *chat._history.uncompressed[:-answer]]
    assert sent == whole_of(chat, tokenizer)


def test_a_history_of_messages_is_sent_as_it_grows(client, server, tokenizer):
    system = {"role": "system", "content": "Search. " + TEXT[:100]}
    asked = [{"role": "user", "content": "Who?"}, {"role": "tool", "content": TEXT[100:300]}]
    prompt = gracekv.Prompt.from_messages(tokenizer, [system])
    client.compress("agent", prompt.ids[: prompt.spans.context_end], ratio=1)
    with client.chat("agent", compact=Compaction(after=32, recent=0), messages=1) as chat:
        with pytest.raises(PromptError, match="consists of messages"):
            chat.ask("Who?")
        answer = {"role": "assistant", "content": chat.send([system, *asked])}
        history = [system, *asked, answer]
        assert chat.messages == history
        raw = tokenizer.apply_chat_template(history[:3], tokenize=False, add_generation_prompt=True)
        whole = tokenizer(raw, add_special_tokens=False)["input_ids"]
        sent = [body["prompt"] for body in server.bodies if body.get("stream")]
        assert sent == [whole[prompt.spans.context_end :]]
        more = {"role": "user", "content": "Why?"}
        chat.send([*history, more], tools=[])
        open_stream = chat.stream("And?")
        next(open_stream)
        chat.ask("Is it?")
        with pytest.raises(ConfigError, match="Another turn was answered"):
            list(open_stream)
        asked[0]["content"], changed = "Where?", [*asked, answer, more]
        system = {**system, "refusal": None}  # as added by clients
        with pytest.raises(EditedHistoryError, match="Message 1"):
            chat.send([system, *changed])
        assert extensions(server)[0][0]["name"] == "agent"
        with pytest.raises(ValueError, match="Did you mean 'compress'"):
            chat.send([system, *changed], edited="compres")
        with pytest.raises(PromptError, match="role"):
            chat.send([system, *changed[:-1], {}], edited="compress")
        with pytest.raises(EditedHistoryError, match=r"Message 0.*compress a new context"):
            chat.send([{**system, "content": "Sing."}, *changed], edited="compress")
        held = server.contexts.pop("agent")
        with pytest.raises(StoreError, match="no context 'agent'"):
            chat.send([system, *changed], edited="compress")
        server.contexts["agent"] = held
        assert chat.messages[1]["content"] == "Who?"
        assert chat.context in {x.name for x in client.list()}
        chat.send([system, *changed], tools=[], edited="compress")
        assert chat.messages[1:5] == changed
        asked = [x["kv_transfer_params"] for x in server.bodies if "stream" in x]
        assert asked[-1] == {"gracekv": "agent", "gracekv_exact": True}


def test_a_long_history_is_compressed_before_it_is_sent(client, server, tokenizer):
    chat, _ = talk(client, server, 9)
    edited = [{"role": "user", "content": "Who fell?"}, *chat.messages[1:], chat.messages[0]]
    turns = [ids for _, ids in History().new_turns(tokenizer, edited)]
    other = client.chat("book", compact=chat._compact)
    for talking, how in ((chat, {"edited": "compress"}), (other, {})):
        talking.send(edited, **how)
        sent = [x for x in server.bodies if x.get("stream")][-1]
        # The two recent messages and the last one are sent, the others are in the context.
        assert sent["prompt"] == [*chain(*turns[-3:])]
        context = sent["kv_transfer_params"]["gracekv"]
        assert compressed(server, context) == [*chain(*turns[:-3])]
        # As if said in turn, since a server may refuse what is too long.
        assert extensions(server)[-1][1] != [*chain(*turns[:-3])]
    # For each conversation its context and the next one.
    assert len(client.list()) <= 5


def test_tools_that_are_edited_in_place_are_other_tools(client, server):
    client.compress("agent", [5, 6, 7], ratio=1)
    chat, tools = client.chat("agent", messages=1), [{"name": "find"}]
    asked = {"role": "user", "content": "Who?"}
    chat.send([{"role": "system", "content": "Search."}, asked], tools=tools)
    tools[0]["name"] = "seek"
    with pytest.raises(EditedHistoryError, match="tools are not"):
        chat.send([*chat.messages, asked], tools=tools)


def test_a_conversation_goes_on_while_its_next_context_is_made(tokenizer):
    with context_server(tokenizer, looks=10**9) as slow:
        client = Client(slow.url)
        client.compress("book", TEXT, ratio=4, wait=False)
        chat, sent = talk(client, slow, 6)
        assert [name for name, _ in sent] == ["book"] * 6
        assert len(extensions(slow)) == 1
        assert sent[-1][1] == whole_of(chat, tokenizer)


def test_messages_that_are_kept_have_all_their_entries(client, server):
    talk(client, server, 8, keep=("user",))
    made = extensions(server)
    assert {x.get("ratio") or x["entries_per_head"] - len(ids) for x, ids in made} == {0, 4}


def test_a_closed_conversation_makes_no_contexts(client, server):
    with client.chat("book", compact=Compaction(after=32, recent=0)) as chat:
        answer = chat.stream(8 * QUESTION)
        next(answer)
    list(answer)
    assert not extensions(server)
    with pytest.raises(CacheError, match="conversation is closed"):
        chat.ask(QUESTION)


def test_a_conversation_that_is_closed_during_a_turn_that_fails_stays_closed(client, server):
    chat = client.chat("book")
    chat.ask("Who?")
    server.answer, server.ended = lambda *_: [chat.close() or TEXT], "abort"
    with pytest.raises(StoreError, match="cut this request short"):
        chat.send([{"role": "user", "content": "Where?"}], edited="compress")
    server.ended = "stop"
    with pytest.raises(CacheError, match="conversation is closed"):
        chat.ask(QUESTION)


def test_a_limit_goes_with_each_extension(client, server):
    limit = Limit(kv_bytes="1MiB", every=64)
    talk(client, server, 9, limit=limit)
    sent = [order["limit"] for order, _ in extensions(server)]
    assert [Limit.from_dict(x) for x in sent] == [limit] * len(sent)
    assert len(sent) >= 2


def test_a_refusal_is_raised_once_and_no_message_is_lost(client, server, tokenizer):
    policy, answered = Compaction(after=200, ratio=4, keep=("user",)), 0
    server.answer = lambda ids, order: [TEXT, TEXT]
    chat = client.chat("book", compact=policy)
    for number in range(24):
        server.refusing = number < 12 or number % 2
        with contextlib.suppress(StoreError):
            answered += bool(chat.ask(f"{QUESTION} It is question {number}."))
    assert len(chat.messages) == 2 * answered
    assert 16 < answered < 24
    sent = [body for body in server.bodies if body.get("stream")][-1]
    done = compressed(server, sent["kv_transfer_params"]["gracekv"])
    assert done
    assert done + sent["prompt"] == whole_of(chat, tokenizer)


def test_a_context_that_cannot_be_made_leaves_the_conversation(client, server, tokenizer):
    server.failing = True
    with pytest.raises(StoreError, match=r"could not be compressed\. Its document has one token"):
        talk(client, server, 9)
    chat = client.chat("book", compact=Compaction(after=64, recent=0))
    assert chat.send(2 * [{"role": "user", "content": 3 * TEXT}])
    assert "could not be compressed" in str(chat._failure)
    server.failing, chat = False, client.chat("book")
    assert chat.ask(QUESTION)
    with pytest.raises(PromptError, match="must be non-empty"):
        chat.ask("")
