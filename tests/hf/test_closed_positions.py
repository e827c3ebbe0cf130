"""Caches whose older keys are rotated forward, to continue beyond the model's positions."""

import pytest
import torch

import gracekv
from gracekv import Limit
from gracekv.errors import CacheError, PromptError, ReportError
from gracekv.prefill.model_layers import rotations_up_to
from gracekv.report.entries import result_entries
from gracekv.testing.models import tiny_model
from support.prompts import WORDS, words_book
from support.static_tails import steps

PROMPT = gracekv.Prompt.from_ids(torch.arange(60) * 13 % 97, (4, 50))
SIZES = {"entries_per_head": 80, "every": 16, "window": 8}


FAMILIES = [
    ("llama", {}),
    ("llama", {"rope": "yarn", "original": 32}),
    ("glm4", {"partial": 0.5}),
    ("smollm3", {}),
    ("gemma3_text", {"window": 24}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_closed_keys_are_those_of_the_closed_positions(family, options):
    """The first compressed layer's keys do not depend on cuts, so a full cache has them, too."""
    model, known = tiny_model(family, **{"positions": 4096, **options}), 128
    book = gracekv.compress(model, PROMPT, ratio=2)
    plain, cache = book.new_cache(), book.new_cache(Limit(**SIZES, positions="closed"))
    cache._known = known
    tokens = torch.arange(120) * 7 % 97
    for each in (plain, cache):
        steps(model, each, tokens[None])
    layer, full = cache.grace_layers[0], plain.grace_layers[0]
    entries, places, now = layer.packed.entries, layer.places, cache.packed_length
    assert bool((places > entries.positions).any())
    assert bool((places >= entries.positions).all())
    rope, tail = rotations_up_to(model, now)[0], full._tail(full.tail_length)[0][0]
    for g in range(entries.heads):
        keys, _, positions, _ = entries.head(g)
        old, _, at, _ = full.packed.entries.head(g)
        dense = torch.zeros(plain.packed_length + len(tokens), keys.shape[1])
        dense[at.long()], dense[plain.packed_length :] = old, tail[g]
        to = places[int(entries.offsets[g]) : int(entries.offsets[g + 1])]
        want = rope.rotate(rope.unrotate(dense[positions.long()], positions), to)
        torch.testing.assert_close(keys, want, rtol=1e-4, atol=1e-4)
        assert bool((to.diff() > 0).all())
        assert int(to[-1]) < now
        assert now + layer.tail_length - int(to[0]) <= known


def test_within_the_positions_nothing_changes():
    model = tiny_model(positions=4096)
    book = gracekv.compress(model, PROMPT, ratio=2)
    caches = [book.new_cache(Limit(**SIZES, positions=x)) for x in ("counted", "closed")]
    tokens = torch.arange(120)[None] * 7 % 97
    assert torch.equal(*(steps(model, cache, tokens) for cache in caches))


def test_a_conversation_goes_on_beyond_the_models_positions():
    book = words_book(512, 2)
    sizes = {"entries_per_head": 160, "every": 32, "window": 8}
    with book.chat(Limit(**sizes)) as plain, book.chat(Limit(**sizes, positions="closed")) as chat:
        said = plain.ask(f"word {WORDS[:90]}", max_new_tokens=8)
        assert chat.ask(f"word {WORDS[:90]}", max_new_tokens=8) == said
        with pytest.raises(PromptError, match="has 512"):
            plain.ask(WORDS * 4, max_new_tokens=8)
        for turn in range(20):
            chat.ask(f"word{turn} {WORDS[:180]}", max_new_tokens=4)
        assert len(chat._ids) > 1024
        assert chat._cache._reach + chat._cache.grace_layers[0].tail_length <= 512
        assert chat.accounting.most_entries <= 4 * (160 + 32)
    with pytest.raises(CacheError, match="smaller limit"):
        book.chat(Limit(entries_per_head=600, positions="closed")).ask(WORDS * 3, max_new_tokens=1)


@pytest.mark.parametrize("every", [32, 400])
def test_long_messages_and_restarts_stay_within_the_positions(every):
    """A history, or one message, that is longer than what a compaction may read at once."""
    book = words_book(512, 2)
    limit = Limit(entries_per_head=160, every=every, window=8, positions="closed")
    policy = gracekv.Compaction(after=64, ratio=2, recent=1)
    with book.chat(limit) as plain:
        others = " ".join(f"word{i % 37}" for i in range(150))
        for asked in (WORDS[:180], WORDS, others, WORDS, WORDS):
            plain.ask(f"word1 {asked}", max_new_tokens=4)
        plain.compress(budget=gracekv.Budget.ratio(4))
        assert len(plain.ask("word1", max_new_tokens=4))
    with book.chat(limit, policy) as chat, book.chat(limit, policy) as again:
        for turn in range(12):
            chat.ask(f"word{turn} {WORDS[: 1500 if turn == 6 else 180]}", max_new_tokens=4)
        assert len(chat._ids) > 1024
        with pytest.raises(ReportError, match="Gaps between positions"):
            result_entries(chat._result)
        for one in (again, chat):  # begun with the history, and begun anew after an edit
            asked = [*chat.messages, {"role": "user", "content": "word3"}]
            asked[0] = {"role": "user", "content": f"word5 {WORDS[:180]}"}
            one.send(asked, 4, edited="compress")
            for turn in range(6):
                one.ask(f"word{turn} {WORDS[:180]}", max_new_tokens=4)
            assert one._cache._reach + one._cache.grace_layers[0].tail_length <= 512


REFUSED = [
    ("llama", {"rope": "dynamic"}, "dynamic RoPE"),
    ("phi3", {}, "drops the cache"),
    ("mistral", {"window": 512}, "sliding window"),
]


@pytest.mark.parametrize(("family", "options", "said"), REFUSED)
def test_models_whose_keys_cannot_be_rotated_on_are_refused(family, options, said):
    book = gracekv.compress(tiny_model(family, **options), PROMPT, ratio=2)
    with pytest.raises(CacheError, match=said):
        book.new_cache(Limit(**SIZES, positions="closed"))
