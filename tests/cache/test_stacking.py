"""Caches of several prompts are stacked and taken apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.errors import ShapeError


@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_stacking_and_taking_apart_are_inverse(seed, counts):
    rng = torch.Generator().manual_seed(seed)
    layers = [RaggedEntries.dense(*torch.randn(2, 2, n, 4, generator=rng)) for n in counts]
    caches = [RaggedCache((x,) * 2, length=n) for x, n in zip(layers, counts, strict=True)]
    scored = [x.with_scores([layer.keys[:, 0] for layer in x.layers]) for x in caches]
    assert RaggedCache.stack([scored[0], caches[0]]).scores is None
    caches, stacked = scored, RaggedCache.stack(scored)
    assert stacked.sequences == len(counts)
    assert stacked.length == max(counts)
    assert RaggedCache.stack([stacked, stacked]).padding == 2 * stacked.padding
    for number, cache in enumerate(caches):
        assert cache.sequence(0) is cache
        again = stacked.sequence(number)
        assert (again.length, again.padding) == (cache.length, (0,))
        for one, two in zip(again.layers, cache.layers, strict=True):
            torch.testing.assert_close(one.tensors(), two.tensors(), rtol=0, atol=0)
            for g in range(2):
                assert torch.equal(stacked.layers[0].head(g, number)[0], cache.layers[0].head(g)[0])


def test_layers_that_do_not_fit_are_not_stacked():
    one, two = torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 3, 4)
    with pytest.raises(ShapeError, match="same heads"):
        RaggedEntries.stack([RaggedEntries.dense(*one), RaggedEntries.dense(*two)])
    with pytest.raises(ShapeError, match="4 rows for 3 sequences"):
        RaggedEntries(*(torch.zeros(0, 4),) * 2, *(torch.zeros(0),) * 2, torch.zeros(5).long(), 3)
    layer = RaggedEntries.dense(*one)
    with pytest.raises(ShapeError, match="as many sequences"):
        RaggedCache((layer,), 3, (0, 1))
    with pytest.raises(ShapeError, match="its minimum is 0"):
        RaggedCache((layer,), 3, (1,))
