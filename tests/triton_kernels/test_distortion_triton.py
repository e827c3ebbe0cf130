"""The Triton distortion, interpreted, against the torch engine and the definitions in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.errors import BackendUnavailableError
from gracekv.kernels.rope import Rope
from gracekv.tree import IntervalCosts, Nodes, Prototype, PrototypeRule
from gracekv.tree.engines.reference import ReferenceDistortion
from support.covering import LONG
from support.draws import SEEDS, ints, lists
from support.interval_costs import assert_same_costs, evaluator_of, some_nodes
from support.trees import assert_same_growth, in_slots, tree_context


def check(context, lengths, distortion=None, seed=0):
    """Some nodes and their costs, which must equal those of the torch engine."""
    evaluator, batch = evaluator_of(context, "triton", distortion)
    nodes = some_nodes(batch, seed, lengths)
    costs = evaluator(nodes)
    assert_same_costs(costs, evaluator_of(context, "torch", distortion)[0](nodes), nodes)
    return nodes, costs


@settings(max_examples=6 if LONG else 4)
@given(seed=SEEDS, group=ints(1, 3), lengths=lists(ints(1, 80), min_size=1, max_size=6))
def test_equals_the_torch_engine(seed, group, lengths):
    check(in_slots(tree_context(seed % 1000, group=group, context=170), 80), lengths, seed=seed)


def test_nodes_of_many_lengths():
    context = in_slots(tree_context(1, context=200, layers=1), 97)
    check(context, [1, 2, 15, 16])
    check(context, [16, 17, 31, 32, 33, 64, 65, 96, 97])


def test_costs_match_the_definitions():
    context = in_slots(tree_context(2, layers=1, context=60), 40)
    evaluator, batch = evaluator_of(context, "triton")
    nodes = Nodes(torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([40, 15]))
    costs = evaluator(nodes)
    want = IntervalCosts(torch.zeros(2, 2, 40), torch.zeros(2, 40), torch.zeros(2))
    for v, tree in enumerate(nodes.tree.tolist()):
        reference = ReferenceDistortion(context, 0, tree // context.partition.slots, Prototype())
        origin = int(batch.slot_start[tree])
        a, b = origin + int(nodes.start[v]), origin + int(nodes.end[v])
        for k in range(b - a):
            want.prefix[v, k] = reference.node(a, a + k + 1)
            want.suffix[v, k] = reference.node(a + k, b)
        want.mass[v, : b - a] = torch.tensor(reference.masses(a, b))
        want.drop[v] = reference.drop(a, b)
    assert_same_costs(costs, want, nodes)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_dimension(dim):
    check(in_slots(tree_context(dim, layers=1, context=40, dim=dim), 20), [20, 7])


@pytest.mark.parametrize(("dim", "rotary"), [(80, 32), (24, 8), (64, 2)])
def test_heads_that_rotate_in_part(dim, rotary):
    context = in_slots(tree_context(4, layers=1, context=40, dim=dim), 20)
    rope = Rope.of_theta(context.prefill.spans.length, rotary)
    prefill = dataclasses.replace(context.prefill, rope=rope)
    check(dataclasses.replace(context, prefill=prefill), [18, 7])


def test_every_term_and_option():
    context = in_slots(tree_context(5, layers=1, context=40), 20)
    for distortion in (
        Prototype(lambda_z=1.0, lambda_m=0.0),
        Prototype(lambda_z=0.0, lambda_m=1.0, epsilon=1e-3),
        Prototype(question_probes=2, tail_probes=1, evidence_slots=2, evidence_per_slot=1),
    ):
        check(context, [19, 10], distortion)
    rule = PrototypeRule(uniform_base=1.0, epsilon=1e-3, multiplicity=False)
    check(dataclasses.replace(context, rule=rule), [19, 10])


def test_more_probes_than_a_program_takes():
    context = in_slots(tree_context(7, layers=1, context=40, dim=128), 20)
    distortion = Prototype(evidence_slots=2, evidence_per_slot=10)
    evaluator, _ = evaluator_of(context, "triton", distortion)
    assert evaluator._constants["P"] > evaluator._constants["BLOCK_P"]
    check(context, [20, 9], distortion)


def test_a_node_does_not_depend_on_others_and_repeats_to_the_bit():
    evaluator, batch = evaluator_of(in_slots(tree_context(8, layers=1, context=70), 30), "triton")
    nodes = Nodes(torch.tensor([1, 3]), torch.tensor([4, 0]), torch.tensor([25, 10]))
    costs = evaluator(nodes)
    # Numbers outside the nodes must not be read.
    outside = torch.ones(len(evaluator._arguments["scores"]), dtype=torch.bool)
    tokens = len(evaluator._arguments["visible_probes"])
    first = batch.head(nodes.tree) * tokens + batch.offset(nodes)
    for row, length in zip(first.tolist(), nodes.length.tolist(), strict=True):
        outside[row : row + length] = False
    for name in ("exponentials", "unrotated_keys", "key_norms", "values", "scores"):
        evaluator._arguments[name][outside] = torch.nan
    for other, rows in ((evaluator(nodes), slice(2)), (evaluator(nodes[:1]), slice(1))):
        real = torch.arange(21) < nodes.length[rows, None]
        for name in ("prefix", "suffix", "mass"):
            assert torch.equal(getattr(other, name)[real], getattr(costs, name)[rows][real]), name
        assert torch.equal(other.drop, costs.drop[rows])


def test_grows_the_same_trees():
    assert_same_growth(tree_context(9, layers=1), "triton")


def test_wide_heads_are_refused():
    with pytest.raises(BackendUnavailableError, match=r"256 or less; got 288\. Use engine 'torch'"):
        evaluator_of(tree_context(11, layers=1, dim=288), "triton")
