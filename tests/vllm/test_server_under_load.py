"""A server with a tiny model under load, and killed while it saves."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.loaded_server import answer, asked, loaded_server, same, words

pytestmark = [pytest.mark.vllm, pytest.mark.long]

DOCUMENTS, AT_ONCE = 20, 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with loaded_server(tmp_path_factory.mktemp("load")) as running:
        yield running


@pytest.fixture
def client(server):
    from gracekv.vllm import Client

    return Client(f"{server.url}/v1", tokenizer=server.tokenizer)


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
    assert {one.name: one.state for one in client.list()} == dict.fromkeys(names, "ready")
    for name, found in zip(names, about, strict=True):
        assert same(found, answer(server, asked(server, name), name)), name
        # Made again when nothing else runs.
        client.compress("alone", words(name), ratio=3)
        assert same(found, answer(server, asked(server, "alone"), "alone")), name
    for ids, found in zip(plain, ordinary, strict=True):
        assert same(found, answer(server, ids))
    # The comparison can fail: other documents have different answers.
    pairs = list(itertools.pairwise(about))
    assert sum(same(*pair) for pair in pairs) < len(pairs) / 4
    for name in ("alone", *names):
        client.delete(name)


def test_a_server_that_is_killed_while_it_saves_serves_whole_contexts_only(server, client):
    """Each name has its old context or the new one, and contexts saved before answer the same."""
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
