"""Scissorhands' counts, against plain loops."""

import itertools

import torch
from hypothesis import given, settings

from gracekv.value import Scissorhands, reference
from support.draws import SEEDS, ints, some
from support.lean_prefills import small
from support.margins import SCORES


@settings(max_examples=10)
@given(seed=SEEDS, kv_heads=ints(1, 2), group=ints(1, 3), history=some([1, 5, 400]))
def test_equals_plain_loops(seed, kv_heads, group, history):
    prefill = small(kv_heads=kv_heads, group=group, seed=seed)
    region, length = prefill.spans.region(4), prefill.spans.length
    tokens = Scissorhands(history=history)(prefill, region).scores
    sums = reference.column_sums(prefill, region)
    for layer in range(prefill.layers):
        for g in range(kv_heads):
            # Certain and possible counts: a probability may equal its threshold up to rounding.
            sure, possible = [0] * region.length, [0] * region.length
            for head in range(g * group, (g + 1) * group):
                for u in range(max(0, length - history), length):
                    row = reference.attention_probability(prefill, layer, head, u)
                    for t in range(region.start, min(region.end, u + 1)):
                        sure[t - region.start] += row[t] >= (1 + SCORES) / (u + 1)
                        possible[t - region.start] += row[t] >= (1 - SCORES) / (u + 1)
            order = tokens[layer, g].sort(descending=True).indices.tolist()
            for one, two in itertools.pairwise(order):
                assert possible[one] >= sure[two]
                if sure[one] == possible[one] == sure[two] == possible[two]:
                    # Equal counts are ordered by their sums.
                    assert sums[layer, g, one] >= sums[layer, g, two] * (1 - SCORES)
    torch.testing.assert_close(tokens.sum(-1), torch.ones(prefill.layers, kv_heads))
