"""The interval table against the equations in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.prefill import Prefill
from gracekv.segment import Partition
from gracekv.testing.trees import tree_context
from gracekv.tree import Prototype, PrototypeRule, TreeContext
from gracekv.tree.reference import ReferenceDistortion
from gracekv.tree.workspace import Workspace


def compare(context: TreeContext, distortion: Prototype, tolerance: float) -> None:
    bounds, slots = context.partition.bounds.tolist(), context.partition.slots
    for layer in range(context.prefill.layers):
        table = distortion.table(context, [layer])
        for item in range(context.prefill.kv_heads * slots):
            judge = ReferenceDistortion(context, layer, item // slots, distortion)
            a, b = bounds[item % slots], bounds[item % slots + 1]
            assert float(table.drop[item]) == pytest.approx(judge.drop(a, b), rel=1e-4)
            at = torch.tensor(item)
            for i in range(a, b):
                for j in range(i + 1, b + 1):
                    got = float(table.at(at, torch.tensor(i - a), torch.tensor(j - a)))
                    want = judge.node(i, j)
                    assert got == pytest.approx(want, rel=tolerance, abs=1e-8), (i, j)
            masses = table.masses(at[None], torch.tensor([b - a]), torch.arange(b - a)[None])[0]
            want = torch.tensor(judge.masses(a, b))
            torch.testing.assert_close(masses.double(), want.double(), rtol=1e-4, atol=1e-9)


@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), group=st.integers(1, 3))
def test_table_matches_the_definitions(seed: int, group: int) -> None:
    # fp32 products of exponentials against float64 definitions; the notes promise 5e-5.
    compare(tree_context(seed, group=group), Prototype(), tolerance=2e-4)


def test_every_term_and_option_reaches_the_table() -> None:
    context = tree_context(3)
    for distortion in (
        Prototype(lambda_z=1.0, lambda_m=0.0),
        Prototype(lambda_z=0.0, lambda_m=1.0),
        Prototype(evidence_slots=0),
        Prototype(question_probes=2, tail_probes=1, evidence_slots=2, evidence_per_slot=1),
    ):
        compare(context, distortion, tolerance=2e-4)
    flat = dataclasses.replace(context, rule=PrototypeRule(uniform_base=1.0, multiplicity=False))
    compare(flat, Prototype(), tolerance=2e-4)


def test_chunks_do_not_change_the_table() -> None:
    context = tree_context(7, context=400)
    region = context.partition.region
    even = Partition(torch.arange(region.start, region.end + 1, region.length // 20))
    context = dataclasses.replace(context, partition=even)
    whole = Prototype(memory_limit=2**30).table(context, [0])
    split = Prototype(memory_limit=2**20).table(context, [0])
    space = Workspace(torch.device("cpu"))
    parts = [
        len(list(Prototype(memory_limit=m).parts(context, [0], space))) for m in (2**20, 2**30)
    ]
    assert parts[0] > parts[1]
    for item, length in enumerate(whole.length.tolist()):
        start, end = torch.triu_indices(length, length)
        pick = (torch.tensor(item), start, end + 1)
        torch.testing.assert_close(whole.at(*pick), split.at(*pick))


def test_a_spike_beside_a_flat_interval_is_not_drowned() -> None:
    """Differences of running sums would lose the flat interval's mass (departures 4)."""
    context = tree_context(1)
    region = context.partition.region
    keys = [k.clone() for k in context.prefill.keys]
    query = context.prefill.queries[0][0, -1]
    keys[0][0, region.start] = 40 * query / query.norm()
    spiked = dataclasses.replace(context.prefill, keys=tuple(keys))
    compare(dataclasses.replace(context, prefill=spiked), Prototype(), tolerance=2e-4)


def test_identical_tokens_merge_without_loss() -> None:
    """Equal keys and values without rotation: Z~ = Z and M~ = M, the multiplicity's exact limit."""
    context = tree_context(2)
    prefill: Prefill = context.prefill
    still = dataclasses.replace(
        prefill,
        keys=tuple(torch.ones_like(k) for k in prefill.keys),
        values=tuple(torch.ones_like(v) for v in prefill.values),
        rope=type(prefill.rope)(
            torch.ones_like(prefill.rope.cos), torch.zeros_like(prefill.rope.sin)
        ),
    )
    table = Prototype().table(dataclasses.replace(context, prefill=still), [0])
    for item, length in enumerate(table.length.tolist()):
        start, end = torch.triu_indices(length, length)
        distortion = table.at(torch.tensor(item), start, end + 1)
        assert float(distortion.abs().max()) < 1e-6  # |M|^2 in fp32
