"""A server of a tiny model under load, and killed while it saves."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.engine_answers import MARGIN
from support.vllm_server import NAME, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.long]

DOCUMENTS, AT_ONCE, TOKENS = 20, 4, 24
QUESTION = "Why is she tired?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from gracekv.testing.models import tiny_llama, tiny_tokenizer

    folder = tmp_path_factory.mktemp("load")
    tokenizer = tiny_tokenizer(vocabulary=500)
    tiny_llama(vocabulary=500, dim=32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "store").mkdir()
    options = ("--max-model-len", "2048", "--max-num-batched-tokens", "128", "--max-num-seqs", "12")
    with vllm_server(folder, folder / "model", folder / "store", *options) as running:
        running.tokenizer = tokenizer
        yield running


@pytest.fixture
def client(server):
    from gracekv.vllm import Client

    return Client(f"{server.url}/v1", tokenizer=server.tokenizer)


def words(seed, count=120):
    """A text of its own for each seed."""
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefgh", k=4)) for _ in range(count))


def answer(server, ids, name=None):
    """The tokens of a greedy answer with their log-probabilities."""
    import httpx

    body = {
        "model": NAME, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0, "logprobs": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if name is not None:
        body["kv_transfer_params"] = {"gracekv": name}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert [len(x) for x in found] == [TOKENS, TOKENS]
    return list(zip(*found, strict=True))


def same(found, wanted):
    """Whether two greedy answers agree up to the first near-tie, which may part them."""
    for (token, mine), (other, theirs) in zip(found, wanted, strict=True):
        if abs(mine - theirs) > MARGIN:
            return False
        if token != other:
            break
    return True


def asked(server, name):
    from gracekv.vllm import request

    return request(None, name, QUESTION, server.tokenizer).prompt_ids


def test_documents_beside_ordinary_requests_lose_and_mix_nothing(server, client):
    names = [f"d{number}" for number in range(DOCUMENTS)]
    plain = [server.tokenizer(words(f"plain {n}", 20)).input_ids for n in range(DOCUMENTS)]

    def both(name):
        client.compress(name, words(name), ratio=3)
        return answer(server, asked(server, name), name)

    with ThreadPoolExecutor(AT_ONCE) as documents, ThreadPoolExecutor(AT_ONCE) as others:
        ordinary = [others.submit(answer, server, ids) for ids in plain]
        about = list(documents.map(both, names))
        ordinary = [one.result() for one in ordinary]
    states = {one.name: one.state for one in client.list()}
    assert states == dict.fromkeys(names, "ready")
    for name, found in zip(names, about, strict=True):
        assert same(found, answer(server, asked(server, name), name)), name
        # Made again when nothing else runs.
        client.compress("alone", words(name), ratio=3)
        assert same(found, answer(server, asked(server, "alone"), "alone")), name
    for ids, found in zip(plain, ordinary, strict=True):
        assert same(found, answer(server, ids))
    # The comparison can fail: other documents have other answers.
    pairs = list(itertools.pairwise(about))
    assert sum(same(*pair) for pair in pairs) < len(pairs) / 4
    for name in ("alone", *names):
        client.delete(name)


def test_a_server_that_is_killed_while_it_saves_serves_whole_contexts_only(server, client):
    """Of each name the old context or the new one, and what was saved before answers the same."""
    from gracekv.vllm import ContextStore

    client.compress("before", words("before"), ratio=3, save=True)
    wanted = answer(server, asked(server, "before"), "before")
    client.compress("book", words("old"), ratio=3, save=True)
    old = answer(server, asked(server, "book"), "book")
    client.compress("book", words("new"), ratio=3, save=True)
    new = answer(server, asked(server, "book"), "book")
    assert not same(old, new)
    seen = []
    for number in range(2):
        texts = {f"n{x}": words(f"{number} {x}") for x in range(6)} | {"book": words("old")}
        for name, text in texts.items():
            client.compress(name, text, ratio=3, save=True, wait=False)
        end = time.monotonic() + 2
        while time.monotonic() < end and not any(server.store.glob("*/new.safetensors")):
            pass
        server.kill()
        store = ContextStore(server.store)
        for name in store.names():
            store.load(name)
        server.start()
        listed = {one.name: one for one in client.list()}
        assert listed.keys() == set(store.names())
        assert {one.state for one in listed.values()} == {"ready"}
        seen.append(len(listed))
        for name in listed:
            answer(server, asked(server, name), name)
        assert same(answer(server, asked(server, "before"), "before"), wanted)
        book = answer(server, asked(server, "book"), "book")
        assert same(book, old) or same(book, new)
    client.compress("n0", words("after"), ratio=3, save=True)
    assert min(seen) >= 2
