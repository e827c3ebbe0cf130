"""Entries that go into pages: where they are written, and which prompts take them."""

from types import SimpleNamespace

import pytest
import torch

from gracekv.cache.base import RaggedEntries
from gracekv.errors import StoreError
from gracekv.vllm.equal_shares import check_prompt, write_entries

SHARE, HEADS, DIM, SIZE = 11, 2, 3, 4


class Pages:
    """A layer of an engine that keeps what it is given by slot."""

    def __init__(self):
        self.kv_cache = torch.empty(0)
        self.impl = self
        self.held = {}

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        assert layer is self
        assert kv_cache is self.kv_cache
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            self.held[slot] = k, v


def context():
    keys = torch.arange(float(SHARE * HEADS * DIM)).view(-1, DIM)
    layer = RaggedEntries(
        keys, -keys, torch.arange(SHARE).repeat(HEADS), torch.zeros(SHARE * HEADS),
        torch.tensor([0, SHARE, 2 * SHARE]),
    )  # fmt: skip
    return SimpleNamespace(header=SimpleNamespace(share=SHARE), layers=(layer, layer))


@pytest.mark.parametrize("first", [0, 4, 10])
def test_entries_go_to_the_slots_of_their_tokens(first):
    layers = {0: Pages(), 1: Pages()}
    blocks = [7, 0, 5]
    write_entries(context(), first, blocks, SIZE, layers)
    for number in (0, 1):
        held = layers[number].held
        assert len(held) == SHARE - first
        for entry in range(first, SHARE):
            keys, values = held[blocks[entry // SIZE] * SIZE + entry % SIZE]
            want = context().layers[number].keys.view(HEADS, SHARE, DIM)[:, entry]
            assert torch.equal(keys, want)
            assert torch.equal(values, -want)


@pytest.mark.parametrize(
    ("ids", "skips", "said"),
    [
        ([0] * SHARE, False, "got 11 tokens"),
        ([5, 6], False, "got 2 tokens"),
        ([0] * (SHARE - 1) + [5, 6], False, "begin otherwise"),
        ([0] * SHARE + [5], True, "no log-probabilities"),
    ],
)
def test_prompts_that_leave_no_place_for_the_context_are_refused(ids, skips, said):
    header = SimpleNamespace(share=SHARE)
    with pytest.raises(StoreError, match=said):
        check_prompt(header, "book", ids, SimpleNamespace(skip_reading_prefix_cache=skips))
    check_prompt(header, "book", [0] * SHARE + [5], SimpleNamespace())
