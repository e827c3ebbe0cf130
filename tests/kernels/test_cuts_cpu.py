"""Choices of the compiled splitter are the refiners' own, ties included."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from gracekv.kernels.cuts_cpu import best_cut, candidates, highest, lifting
from gracekv.segment import Partition
from gracekv.testing.trees import tree_context
from gracekv.tree import CostTable, IntervalCosts, Items, Nodes
from gracekv.tree.binary import binary_proposal
from gracekv.tree.extract import extract_proposal, salient_token


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(3, 40),
    most=st.integers(0, 20),
    reward=st.sampled_from([0.0, 0.05, 1.0]),
    steps=st.sampled_from([1, 3, 1000]),
)
def test_coarse_numbers_are_chosen_among_alike(seed, n, most, reward, steps):
    context = tree_context(seed % 50, context=60)
    start = context.partition.region.start
    rng = torch.Generator().manual_seed(seed)

    def coarse(*shape):
        return torch.randint(steps, shape, generator=rng).float()

    items = Items.of(
        dataclasses.replace(
            context,
            partition=Partition(torch.tensor([start, start + n])),
            curvature=coarse(context.prefill.spans.length),
        ),
        [0],
    )
    nodes = Nodes(torch.tensor([0]), torch.tensor([0]), torch.tensor([n]))
    sides, mass, whole = coarse(2, 1, n), coarse(1, n), coarse(1).double()
    sides[0, 0, 0] = sides[1, 0, -1] = 0.0
    table = CostTable(nodes, items, IntervalCosts(sides, mass, torch.zeros(1)), whole)
    want = binary_proposal(nodes, table, most, reward)

    kappa, found = items.curvature.numpy(), sides[:, 0].numpy()
    chosen = np.empty(n, np.bool_)
    candidates(kappa, start, n, most, chosen, np.empty(max(most, 1), np.int64))
    at, gain = best_cut(float(whole), found, n, chosen, kappa, start, reward)
    assert (at, gain) == (int(want.low), float(want.utility))

    lift = highest(mass[0].numpy(), 0, n)
    assert lift == int(salient_token(table))
    assert lifting(float(whole), found, n, lift) == float(extract_proposal(nodes, table).utility)
