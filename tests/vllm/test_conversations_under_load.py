"""Conversations on a server with a tiny model: killed during extensions, and long ones."""

import itertools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.loaded_server import answer, asked, same, words

pytestmark = [pytest.mark.vllm, pytest.mark.long]

# Turns of each of four conversations, and kills of a server; more in manual runs.
TURNS = int(os.environ.get("GRACEKV_TEST_TURNS", 20))
KILLS = int(os.environ.get("GRACEKV_TEST_KILLS", 3))


def test_four_conversations_at_once_stay_within_their_limit(loaded):
    from gracekv import Compaction, Limit

    limit = Limit(entries_per_head=150, every=64, window=8)
    policy = Compaction(after=64, ratio=2, recent=2)
    loaded.client.compress("book", words("book", 60), ratio=2)
    chats = [loaded.client.chat("book", limit, policy) for _ in range(4)]
    entries, memory = [], []

    def talk(numbered, turn):
        number, chat = numbered
        chat.ask(f"{number} {turn} {words(f'{number} {turn}', 12)}", max_tokens=8)

    with ThreadPoolExecutor(4) as pool:
        for turn in range(TURNS):
            list(pool.map(talk, enumerate(chats), itertools.repeat(turn)))
            listed = [one for one in loaded.client.list() if one.entries is not None]
            entries.append(max(one.entries for one in listed))
            memory.append(loaded.memory())
            # Each has the version that it reads, and at most one being made.
            assert len(listed) <= 1 + 2 * len(chats)
    # Memory is printed, for long manual runs.
    print(f"MiB after each tenth: {[x >> 20 for x in memory[:: max(1, TURNS // 10)]]}")
    units = 2 * 2
    assert max(entries) <= (150 - 8) * units
    assert sum(x == (150 - 8) * units for x in entries) > TURNS // 4, "the limit was not reached"
    for chat in chats:
        chat.close()


def test_a_server_that_is_killed_while_it_extends_serves_the_old_or_the_new_context(loaded):
    """At random times: the context on disk is complete, old or new, and answers as before."""
    from gracekv.vllm import ContextStore

    ids = loaded.tokenizer(words("further", 100)).input_ids
    moments = random.Random(0)
    loaded.client.compress("talk", words("talk"), ratio=3, save=True)
    old = ContextStore(loaded.store).header("talk")
    begun = time.monotonic()
    loaded.client.extend("talk", ids, ratio=3, into="longer", save=True)
    took = time.monotonic() - begun
    lengths = old.length, ContextStore(loaded.store).header("longer").length
    wanted = [answer(loaded, asked(loaded, name), name) for name in ("talk", "longer")]
    assert not same(*wanted)
    seen = []
    for _ in range(KILLS):
        loaded.client.extend("talk", ids, ratio=3, save=True, wait=False)
        time.sleep(moments.uniform(0, took))
        loaded.kill()
        seen.append(lengths.index(ContextStore(loaded.store).load("talk").header.length))
        loaded.start()
        assert same(answer(loaded, asked(loaded, "talk"), "talk"), wanted[seen[-1]])
        if seen[-1]:
            loaded.client.compress("talk", words("talk"), ratio=3, save=True)
            assert ContextStore(loaded.store).header("talk").length == old.length
    print(f"old {seen.count(0)}, new {seen.count(1)}")
