"""The OpenAI-compatible server end to end: a separate process, a real client, streaming."""

import json
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.chapter import CHAPTER
from support.engine_answers import check_answer
from support.vllm_server import NAME, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.model]

QUESTION = "Who is the story about?"
TOKENS = 24


@pytest.fixture(scope="module")
def server(served, tmp_path_factory):
    """A store with one context, and a server over it."""
    from gracekv.vllm import export

    folder, book = tmp_path_factory.mktemp("server"), served.results["global"]
    export(book, folder / "store" / "book")
    options = ("--max-model-len", "1024")
    with vllm_server(folder, served.folder, folder / "store", *options) as running:
        running.model, running.tokenizer = served.model, served.tokenizer
        running.results = {"book": book}
        yield running


@pytest.fixture
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def ask(client, server, **options):
    from gracekv.vllm import request

    body = request(server.store, "book", QUESTION, server.tokenizer).body(NAME, TOKENS, **options)
    # Fields that OpenAI's client does not know.
    ours = ("kv_transfer_params", "use_beam_search", "return_token_ids")
    extra = {name: body.pop(name) for name in ours if name in body}
    return client.completions.create(extra_body=extra, **body)


def test_a_client_streams_the_answer(client, server):
    pieces = [chunk.choices[0].text for chunk in ask(client, server, stream=True)]
    assert len(pieces) > 5
    whole = ask(client, server, logprobs=0, return_token_ids=True).choices[0]
    assert whole.text == "".join(pieces)
    logprobs = [{0: SimpleNamespace(logprob=x)} for x in whole.logprobs.token_logprobs]
    answer = SimpleNamespace(token_ids=whole.token_ids, logprobs=logprobs)
    check_answer(server, "book", QUESTION, answer)


def test_a_client_without_python_fills_in_the_header_s_text(client, server):
    import httpx

    header = json.loads((server.store / "book" / "header.json").read_text())
    text = header["question_text"].replace("{question}", QUESTION)
    body = {"model": NAME, "prompt": text, "max_tokens": TOKENS, "temperature": 0}
    body |= {"add_special_tokens": False, "kv_transfer_params": {"gracekv": "book"}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == ask(client, server).choices[0].text


def test_an_unusable_context_is_a_client_s_error(client, server):
    from openai import BadRequestError, NotFoundError

    for name, error, said in (
        ("missing", NotFoundError, "There is no context 'missing'"),
        ("../x", BadRequestError, "name has"),
    ):
        with pytest.raises(error, match=said) as caught:
            client.completions.create(
                model=NAME, prompt=[1, 2], extra_body={"kv_transfer_params": {"gracekv": name}}
            )
        assert str(server.store) not in str(caught.value)
    with pytest.raises(BadRequestError, match="beam search cannot read"):
        ask(client, server, use_beam_search=True)
    plain = client.completions.create(model=NAME, prompt="Alice was", max_tokens=4, temperature=0)
    assert plain.choices[0].text


def test_a_client_compresses_asks_and_deletes(client, server):
    """The server makes the context itself; a chat request continues in the document's turn."""
    import gracekv
    from gracekv.errors import StoreError
    from gracekv.vllm import Client

    text = CHAPTER[:1500]
    mine = Client(f"{server.url}/v1", tokenizer=server.tokenizer)
    made = mine.compress("own", text, ratio=2)
    assert (made.state, made.saved) == ("ready", False)
    assert 1.8 < made.ratio <= 2, "what opens the turn stays whole"
    answer = mine.ask("own", QUESTION, TOKENS)
    assert "".join(mine.stream("own", QUESTION, TOKENS)) == answer
    prompt = gracekv.Prompt.from_chat(server.tokenizer, context=text)
    own = gracekv.compress(server.model, prompt, ratio=2).ask(QUESTION, TOKENS)
    assert answer[:30] == own[:30]
    asked = [{"role": "user", "content": QUESTION}]
    extra = {"kv_transfer_params": {"gracekv": "own"}}
    options = {"max_tokens": TOKENS, "temperature": 0, "extra_body": extra}
    chat = client.chat.completions.create(model=NAME, messages=asked, **options)
    assert chat.choices[0].message.content == answer
    assert [one.name for one in mine.list()] == ["book", "own"]
    mine.delete("own")
    for call in (lambda: mine.ask("own", QUESTION), lambda: mine.delete("own")):
        with pytest.raises(StoreError, match="There is no context 'own'"):
            call()


def test_a_conversation_compresses_itself_and_leaves_nothing(server):
    from gracekv import Compaction
    from gracekv.vllm import Client

    mine = Client(f"{server.url}/v1", tokenizer=server.tokenizer)
    before, alone = mine.list(), mine.ask("book", QUESTION, TOKENS)
    seen = []
    with mine.chat("book", compact=Compaction(after=48, ratio=2, recent=2)) as chat:
        for number in range(5):
            answer = (
                chat.ask(QUESTION, TOKENS) if number else "".join(chat.stream(QUESTION, TOKENS))
            )
            assert number or answer == alone
            seen.append(chat.context)
            while any(one.state == "compressing" for one in mine.list()):
                time.sleep(0.1)
        held = {one.name: one for one in mine.list()}
        assert held["book"] == before[0]
        assert held[chat.context].length > before[0].length
        assert [x["role"] for x in chat.messages] == ["user", "assistant"] * 5
    assert seen[0] == "book"
    assert len(set(seen)) >= 3
    assert mine.list() == before
    assert mine.ask("book", QUESTION, TOKENS) == alone


def test_the_guide_s_curl_lines_do_as_they_say(server):
    import httpx

    from gracekv.errors import StoreError
    from gracekv.vllm import Client

    client = Client(f"{server.url}/v1", tokenizer=server.tokenizer)
    guide = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    replies, asked = [], None
    for line in guide.splitlines():
        if not line.startswith("curl "):
            continue
        url, *_, data = shlex.split(line)[1:]
        body = json.loads(data) | {"model": NAME}
        if len(replies) == 1:
            asked = client.ask("bank", body["messages"][0]["content"], body["max_tokens"])
        url = url.replace("http://localhost:8000", server.url)
        reply = httpx.post(url, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        replies.append(reply.json())
    compressed, answered, listed, deleted = replies
    said = [reply["kv_transfer_params"] for reply in (compressed, listed, deleted)]
    assert said[0] == {"gracekv": {"name": "bank", "state": "compressing"}}
    assert answered["choices"][0]["message"]["content"] == asked
    assert {one["name"]: one["state"] for one in said[1]["gracekv"]["contexts"]}["bank"] == "ready"
    assert said[2] == {"gracekv": {"name": "bank", "state": "deleted"}}
    with pytest.raises(StoreError, match="There is no context 'bank'"):
        list(client.stream("bank", QUESTION))
