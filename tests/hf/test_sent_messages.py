"""Histories of messages as OpenAI's clients send them, with tools, edits and compaction."""

from copy import deepcopy
from datetime import date

import pytest
import torch

import gracekv
from gracekv.errors import ConfigError, EditedHistoryError, PromptError
from gracekv.testing.models import tiny_tokenizer
from support.asked_context import TEXT, same_greedy, steps

# A template with tools, tool calls and results; it removes a thought from older answers.
TEMPLATE = (
    "<s>{% if tools %}<|user|>tools {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }} {% if m.content %}"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"for": "cat"}}}
BEGUN = [
    {"role": "system", "content": "Answer questions about a story. " + TEXT[:200]},
    {"role": "user", "content": "Who\nfell?"},
]
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": TEXT[200:500]}
PARTS = [{"role": "user", "content": [{"type": "text", "text": x} for x in ("Who", "fell?")]}]
THOUGHT = {"role": "assistant", "content": "<think>A cat?</think>Alice."}
LATER = [*BEGUN, CALLED, FOUND, THOUGHT, {"role": "user", "content": "And what does she see?"}]


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer(vocabulary=2000)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def agent(model, tokenizer):
    prompt = gracekv.Prompt.from_messages(tokenizer, BEGUN, tools=TOOLS)
    return gracekv.compress(model, prompt, ratio=1)


@pytest.mark.parametrize("messages", [BEGUN, LATER])
def test_a_history_is_read_as_the_template_shows_it(model, tokenizer, agent, messages):
    with agent.chat() as chat:
        told = chat.send(messages, 6, tools=TOOLS, eos_token_id=1999)
        shown = {"tools": TOOLS, "tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages, **shown)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert torch.equal(chat._ids[:-6], ids)
        want, logits = steps(model, ids, agent.new_cache(), 6)
        same_greedy(chat._ids[-6:], want, logits)
        assert chat.messages == [*messages, {"role": "assistant", "content": told}]


def test_saved_messages_under_a_template_that_shows_the_date(model, tokenizer, tmp_path):
    shown = deepcopy(tokenizer)
    shown.chat_template = {"default": "{{ strftime_now('%-d %b %Y, %A, %j') }}\n" + TEMPLATE}
    prompt = gracekv.Prompt.from_messages(shown, BEGUN, tools=TOOLS, day="2026-01-31")
    assert shown.decode(prompt.ids).startswith("31 Jan 2026, Saturday, 031")
    made = gracekv.compress(model, prompt, ratio=1)
    made.save(tmp_path / "agent.gkv")
    later = gracekv.load(tmp_path / "agent.gkv", model, tokenizer=shown)
    with made.chat() as today, later.chat() as other:
        assert today.send(LATER, 6, tools=TOOLS) == other.send(LATER, 6, tools=TOOLS)
    with pytest.raises(EditedHistoryError, match="not those of the context"):
        later.chat().send([{**BEGUN[0], "content": "Answer."}, *BEGUN[1:]], 6, tools=TOOLS)
    assert gracekv.Prompt.from_messages(shown, BEGUN).day == date.today().isoformat()
    with pytest.raises(PromptError, match=r"day takes a date such as .*; got '31.1.2026'"):
        gracekv.Prompt.from_messages(shown, BEGUN, day="31.1.2026")


def test_messages_may_be_followed_by_a_passage(agent):
    longer = agent.extend(TEXT[500:800], ratio=2)
    assert longer.chat().send(BEGUN, 6, tools=TOOLS)
    with pytest.raises(EditedHistoryError, match="not those of the context"):
        longer.chat().send(PARTS, 6, tools=TOOLS)


def test_only_new_messages_are_read_and_answers_may_come_back_as_calls(tokenizer, agent):
    with agent.chat() as chat:
        chat.send(BEGUN, 6, tools=TOOLS, eos_token_id=1999)
        before = chat._ids
        chat.send([BEGUN[0], *PARTS, CALLED, FOUND], 6, tools=TOOLS, eos_token_id=1999)
        assert torch.equal(chat._ids[: len(before)], before)
        added = tokenizer.decode(chat._ids[len(before) : -6])
        assert added == f"<|end|><|user|>tool {FOUND['content']}<|end|><|assistant|>"
        assert chat.messages[2] == CALLED
        assert isinstance(chat.ask("Why?", 3), str)
        assert [x["role"] for x in chat.messages[-2:]] == ["user", "assistant"]
        other = {**CALLED, "tool_calls": [{**CALL, "id": "2"}]}
        for edited in (other, {**CALLED, "content": "No."}, {**CALLED, "tool_calls": ["f(1)"]}):
            with pytest.raises(EditedHistoryError, match=r"Message 2 \(role 'assistant'\)"):
                chat.send([*BEGUN, edited, *chat.messages[3:], BEGUN[1]], tools=TOOLS)
        # The same call with its arguments as JSON.
        function = {"name": "search", "arguments": '{"for": "cat"}'}
        same = {**CALLED, "tool_calls": [{**CALL, "function": function}]}
        chat.send([*BEGUN, same, *chat.messages[3:], BEGUN[1]], 3, tools=TOOLS)


def test_messages_are_copies_that_can_be_continued(agent):
    with agent.chat() as chat:
        chat.send(LATER, 4, tools=TOOLS)
        read, history = len(chat._ids), chat.messages
        history.append({"role": "user", "content": "Why?"})
        assert len(chat.messages) == len(history) - 1
        chat.send(history, 4, tools=TOOLS)
        assert len(chat._ids) > read + 4
        assert chat.messages[:-1] == history


def test_an_edited_history_is_refused_or_compressed_anew(agent):
    policy = gracekv.Compaction(after=64, ratio=4, recent=0, keep=("tool",))
    edited = [*LATER[:3], {**FOUND, "content": TEXT[500:800]}, *LATER[4:]]
    with agent.chat(compact=policy) as chat, agent.chat(compact=policy) as other:
        mine, defined = deepcopy((LATER, TOOLS))
        told = chat.send(mine, 6, tools=defined)
        # Also if the caller's own list is edited in place.
        mine[0]["content"] += " Quickly."
        held, more = chat.accounting.entries, {"role": "user", "content": "Why?"}
        answer = {"role": "assistant", "content": told}
        for changed in (mine, edited, [BEGUN[0], *LATER[2:]], LATER[:4]):
            with pytest.raises(EditedHistoryError, match=r"Message [013456] \(role"):
                chat.send([*changed, answer, more] if changed[4:] else changed, tools=TOOLS)
        with pytest.raises(EditedHistoryError, match="tools are not"):
            chat.send([*LATER, answer, more])
        with pytest.raises(ConfigError, match="one of refuse, compress; got 'compres'"):
            chat.send(edited, tools=TOOLS, edited="compres")
        for unlike in ({"tools": TOOLS * 2}, {"tools": TOOLS, "max_new_tokens": 5000}):
            with pytest.raises(PromptError, match=r"those of the context|has 4096"):
                chat.send(edited, edited="compress", **unlike)
        assert chat.accounting.entries == held
        assert chat.messages == [*LATER, answer]
        assert repr(chat).startswith("Conversation(2 turns, ")
        got = chat.send(edited, 6, tools=TOOLS, edited="compress")
        assert got == other.send(edited, 6, tools=TOOLS)
        assert torch.equal(chat._ids, other._ids)
        # The tool's result keeps all its entries, the preceding call a quarter.
        result = agent.tokenizer(FOUND["content"])["input_ids"]
        entries = chat._result.packed.entries().float().mean() - agent.packed.length
        assert len(result) < entries < chat._result.packed.length - agent.packed.length - 20


def test_what_cannot_follow_the_context_is_refused(model, tokenizer, agent, tmp_path):
    document = gracekv.Prompt.from_chat(tokenizer, context=TEXT)
    with gracekv.compress(model, document, ratio=4).chat() as chat:
        for messages, tools in ((BEGUN, None), (BEGUN[1:], TOOLS)):
            with pytest.raises(PromptError, match="come before the context"):
                chat.send(messages, tools=tools)
        chat.send(PARTS, 3)
        assert tokenizer.decode(chat._ids[:-3]).endswith("\n\nWho\nfell?<|end|><|assistant|>")
        with pytest.raises(PromptError, match="no new message"):
            chat.send(chat.messages)
    with agent.chat() as chat:
        for messages, tools in ((LATER[1:], TOOLS), (BEGUN, None)):
            with pytest.raises(EditedHistoryError, match=r"context\. Send them unchanged, or"):
                chat.send(messages, tools=tools)
        for ask in (chat.ask, agent.ask):
            with pytest.raises(PromptError, match="consists of messages"):
                ask("Who?")
    with pytest.raises(PromptError, match="at least one message"):
        gracekv.Prompt.from_messages(tokenizer, [])
    agent.save(tmp_path / "agent.gracekv")
    again = gracekv.load(tmp_path / "agent.gracekv", model, tokenizer=tokenizer)
    with agent.chat() as one, again.chat() as other:
        assert one.send(LATER, 6, tools=TOOLS) == other.send(LATER, 6, tools=TOOLS)


@pytest.mark.parametrize("made_of", ["messages", "document"])
def test_malformed_messages_are_refused(model, tokenizer, agent, made_of):
    if made_of == "document":
        agent = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=TEXT), ratio=2)
    user, parts = {"role": "user"}, [*PARTS[0]["content"], {"type": "image_url", "image_url": {}}]
    unread = [user, *({**user, "content": x} for x in (parts, None, 5)), {"role": "assistant"}]
    for wanted, given in {
        r"a list \(for a text, use chat\.ask\); got (str|dict)": ["Who?", BEGUN[1]],
        r"of message 0 must be text; got \w+\. Content .*parts": [[x] for x in unread],
        "with a role of system, .* got": [["Who?"], [{"content": "Who?"}]],
        "got 'usr'. Did you mean 'user'": [[{"role": "usr"}]],
    }.items():
        for messages in given:
            with agent.chat() as chat, pytest.raises(PromptError, match=wanted):
                chat.send(messages)
            with pytest.raises(PromptError, match=wanted):
                gracekv.Prompt.from_messages(tokenizer, messages)
