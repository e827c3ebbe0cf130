"""The compiled choice of a split equals that of `SplitRule`, ties included."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given

from support.draws import ints, some

pytest.importorskip("numba")

from gracekv.segment import Partition
from gracekv.tree import CostTable, IntervalCosts, Nodes, TreeBatch
from gracekv.tree.engines import numba_split_choice
from gracekv.tree.refine import best_cut, extraction_utility, salient_token
from support.trees import tree_context


@given(
    seed=ints(0, 2**31), n=ints(3, 40), cuts=ints(0, 20), reward=some([0.0, 0.05, 1.0]),
    steps=some([1, 3, 1000]),
)  # fmt: skip
def test_same_choice_with_ties(seed, n, cuts, reward, steps):
    context = tree_context(seed % 50, context=60)
    start = context.partition.region.start
    rng = torch.Generator().manual_seed(seed)

    def coarse(*shape):
        return torch.randint(steps, shape, generator=rng).float()

    one, curvature = torch.tensor([start, start + n]), coarse(context.prefill.spans.length)
    context = dataclasses.replace(context, partition=Partition(one), curvature=curvature)
    batch = TreeBatch.of(context, [0])
    nodes = Nodes(torch.tensor([0]), torch.tensor([0]), torch.tensor([n]))
    costs, mass, node_cost = coarse(2, 1, n), coarse(1, n), coarse(1).double()
    costs[0, 0, 0] = costs[1, 0, -1] = 0.0
    intervals = IntervalCosts(costs, mass, torch.zeros(1))
    table = CostTable(nodes, batch, intervals, node_cost, torch.tensor([False]))
    low, most = best_cut(table, cuts, reward)

    kappa, found = batch.curvature.numpy(), costs[:, 0].numpy()
    chosen = np.empty(n, np.bool_)
    top = np.empty(max(cuts, 1), np.int64)
    numba_split_choice.mark_cuts(kappa, start, n, cuts, chosen, top)
    at, gain = numba_split_choice.best_cut(float(node_cost), found, n, chosen, kappa, start, reward)
    assert (at, gain) == (int(low), float(most))

    token = numba_split_choice.argmax(mass[0].numpy(), 0, n)
    salient = salient_token(table)
    assert token == int(salient)
    utility = numba_split_choice.extraction_utility(float(node_cost), found, n, token)
    assert utility == float(extraction_utility(table, salient))
