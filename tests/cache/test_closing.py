"""Gaps between positions are closed, longest first."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.cache.base import RaggedEntries
from gracekv.cache.closing import closed
from gracekv.kernels import ragged
from gracekv.kernels.rope import Rope


@given(seed=st.integers(0, 2**20), reach=st.integers(1, 220))
def test_only_the_longest_gaps_of_a_head_are_closed(seed, reach):
    """Adjacent entries stay adjacent; otherwise many heads would read far entries as near ones."""
    generator = torch.Generator().manual_seed(seed)
    now, heads = 200, [torch.randperm(200, generator=generator)[:n].sort()[0] for n in (5, 40, 0)]
    positions = torch.cat(heads).int()
    keys = torch.ones(len(positions), 8)
    bounds = ragged.offsets(torch.tensor([len(own) for own in heads]))
    entries = RaggedEntries(keys, keys, positions, torch.zeros(len(keys)), bounds)
    rope = Rope.of_theta(now + 1, 8)
    moved = closed(entries, now, rope, reach)
    for g, own in enumerate(heads[:2]):
        made, _, to, _ = moved.head(g)
        before, after = (torch.cat([x.long(), torch.tensor([now])]).diff() for x in (own, to))
        longest = int(after.max())
        assert torch.equal(after, before.clamp(max=longest))
        assert now - int(to[0]) <= max(reach, len(own))
        # One more would be too many, unless there is no gap to close.
        assert torch.equal(before, after) or int(before.clamp(max=longest + 1).sum()) > reach
        want = rope.rotate(rope.unrotate(torch.ones(len(own), 8), own), to.long())
        torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
