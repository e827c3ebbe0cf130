"""A server with a tiny model under load, and killed while it saves."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.loaded_server import answer, asked, same, words

pytestmark = [pytest.mark.vllm, pytest.mark.long]

DOCUMENTS, AT_ONCE = 20, 4


def test_documents_beside_ordinary_requests_lose_and_mix_nothing(loaded):
    names = [f"d{number}" for number in range(DOCUMENTS)]
    plain = [loaded.tokenizer(words(f"plain {n}", 20)).input_ids for n in range(DOCUMENTS)]

    def both(name):
        loaded.client.compress(name, words(name), ratio=3)
        return answer(loaded, asked(loaded, name), name)

    with ThreadPoolExecutor(AT_ONCE) as documents, ThreadPoolExecutor(AT_ONCE) as others:
        ordinary = [others.submit(answer, loaded, ids) for ids in plain]
        about = list(documents.map(both, names))
        ordinary = [one.result() for one in ordinary]
    assert {one.name: one.state for one in loaded.client.list()} == dict.fromkeys(names, "ready")
    for name, found in zip(names, about, strict=True):
        assert same(found, answer(loaded, asked(loaded, name), name)), name
        # Made again when nothing else runs.
        loaded.client.compress("alone", words(name), ratio=3)
        assert same(found, answer(loaded, asked(loaded, "alone"), "alone")), name
    for ids, found in zip(plain, ordinary, strict=True):
        assert same(found, answer(loaded, ids))
    # The comparison can fail: other documents have different answers.
    pairs = list(itertools.pairwise(about))
    assert sum(same(*pair) for pair in pairs) < len(pairs) / 4
    for name in ("alone", *names):
        loaded.client.delete(name)


def test_a_server_that_is_killed_while_it_saves_serves_whole_contexts_only(loaded):
    """Each name has its old context or the new one, and contexts saved before answer the same."""
    from gracekv.vllm import ContextStore

    loaded.client.compress("before", words("before"), ratio=3, save=True)
    wanted = answer(loaded, asked(loaded, "before"), "before")
    loaded.client.compress("book", words("old"), ratio=3, save=True)
    old = answer(loaded, asked(loaded, "book"), "book")
    loaded.client.compress("book", words("new"), ratio=3, save=True)
    new = answer(loaded, asked(loaded, "book"), "book")
    assert not same(old, new)
    seen = []
    for number in range(2):
        texts = {f"n{x}": words(f"{number} {x}") for x in range(6)} | {"book": words("old")}
        for name, text in texts.items():
            loaded.client.compress(name, text, ratio=3, save=True, wait=False)
        end = time.monotonic() + 2
        while time.monotonic() < end and not any(loaded.store.glob("*/new.safetensors")):
            pass
        loaded.kill()
        store = ContextStore(loaded.store)
        for name in store.names():
            store.load(name)
        loaded.start()
        listed = {one.name: one for one in loaded.client.list()}
        assert listed.keys() == set(store.names())
        assert {one.state for one in listed.values()} == {"ready"}
        seen.append(len(listed))
        for name in listed:
            answer(loaded, asked(loaded, name), name)
        assert same(answer(loaded, asked(loaded, "before"), "before"), wanted)
        book = answer(loaded, asked(loaded, "book"), "book")
        assert same(book, old) or same(book, new)
    loaded.client.compress("n0", words("after"), ratio=3, save=True)
    assert min(seen) >= 2
