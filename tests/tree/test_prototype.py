"""Distortion of prefixes and suffixes of nodes, against the equations in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import BackendUnavailableError
from gracekv.segment import Partition
from gracekv.tree import Nodes, Prototype, PrototypeRule, TreeContext
from gracekv.tree.engines.base import select_engine
from gracekv.tree.engines.reference import ReferenceDistortion
from support.interval_costs import evaluator_of
from support.trees import tree_context

# float32 products of exponentials against float64 definitions; about 5e-5 is expected.
TOLERANCE = 2e-4


def compare(context: TreeContext, distortion: Prototype) -> None:
    """The CPU engines against the definitions, in every head."""
    bounds, slots = context.partition.bounds.tolist(), context.partition.slots
    engines = ("torch", "numba") if context.prefill.softcap is None else ("torch",)
    for layer in range(context.prefill.layers):
        evaluators = [evaluator_of(context, engine, distortion, [layer])[0] for engine in engines]
        for tree in range(context.prefill.kv_heads * slots):
            reference = ReferenceDistortion(context, layer, tree // slots, distortion)
            a, b = bounds[tree % slots], bounds[tree % slots + 1]
            # Nodes with every start and every end, narrower ones padded; together their prefixes,
            # and likewise their suffixes, are all intervals of the slot.
            spans = [(i, b) for i in range(a, b)] + [(a, j) for j in range(a + 1, b)]
            want = {(i, j): reference.node(i, j) for i in range(a, b) for j in range(i + 1, b + 1)}
            drops = torch.tensor([reference.drop(i, j) for i, j in spans])
            mass = torch.tensor(reference.masses(a, b)).float()
            at = torch.tensor(spans) - a
            for evaluator in evaluators:
                costs = evaluator(Nodes(torch.full((len(spans),), tree), at[:, 0], at[:, 1]))
                torch.testing.assert_close(costs.drop, drops.float(), rtol=1e-4, atol=0)
                torch.testing.assert_close(costs.mass[0, : b - a], mass, rtol=1e-4, atol=1e-9)
                for row, (i, j) in enumerate(spans):
                    for k in range(j - i):
                        assert float(costs.prefix[row, k]) == pytest.approx(
                            want[i, i + k + 1], rel=TOLERANCE, abs=1e-8
                        ), (i, i + k + 1)
                        assert float(costs.suffix[row, k]) == pytest.approx(
                            want[i + k, j], rel=TOLERANCE, abs=1e-8
                        ), (i + k, j)


@settings(max_examples=3)
@given(seed=st.integers(0, 10_000), group=st.integers(1, 3))
def test_costs_match_the_definitions(seed: int, group: int) -> None:
    compare(tree_context(seed, group=group, context=30), Prototype())


def test_every_term_and_option_reaches_the_costs() -> None:
    context = tree_context(3, context=24, layers=1)
    for distortion in (
        Prototype(lambda_z=1.0, lambda_m=0.0),
        Prototype(lambda_z=0.0, lambda_m=1.0),
        Prototype(evidence_slots=0),
        Prototype(question_probes=2, tail_probes=1, evidence_slots=2, evidence_per_slot=1),
    ):
        compare(context, distortion)
    flat = dataclasses.replace(context, rule=PrototypeRule(uniform_base=1.0, multiplicity=False))
    compare(flat, Prototype())


def test_capped_logits_reach_the_costs() -> None:
    context = tree_context(3, context=24, layers=1)
    capped = dataclasses.replace(context.prefill, softcap=1.5)
    compare(dataclasses.replace(context, prefill=capped), Prototype())
    with pytest.raises(BackendUnavailableError, match="does not cap logits"):
        select_engine("numba", torch.zeros(3, 8), softcap=1.5)


def test_chunks_do_not_change_the_costs() -> None:
    context = tree_context(7, context=400)
    region = context.partition.region
    even = Partition(torch.arange(region.start, region.end + 1, region.length // 20))
    context = dataclasses.replace(context, partition=even)
    costs = []
    for limit in (2**20, 2**30):
        evaluator, batch = evaluator_of(context, "torch", Prototype(memory_limit=limit))
        costs.append(evaluator(batch.roots()))
    whole = batch.length.max() == batch.length
    for name in ("prefix", "suffix", "mass", "drop"):
        one, other = (getattr(cost, name)[whole] for cost in costs)
        torch.testing.assert_close(one, other, msg=name)


def test_a_spike_beside_a_flat_interval_is_not_drowned() -> None:
    """Differences of running sums would lose the flat interval's mass (departures 4)."""
    context = tree_context(1, layers=1)
    keys = [k.clone() for k in context.prefill.keys]
    query = context.prefill.queries[0][0, -1]
    keys[0][0, context.partition.region.start] = 40 * query / query.norm()
    spiked = dataclasses.replace(context.prefill, keys=tuple(keys))
    compare(dataclasses.replace(context, prefill=spiked), Prototype())


def test_numba_without_numba_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = tree_context(2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"gracekv\[cpu\]"):
        evaluator_of(context, "numba", layers=[0])
    evaluator_of(context, "auto", layers=[0])
