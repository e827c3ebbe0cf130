"""The interval table against the equations in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.prefill import Prefill
from gracekv.testing.trees import tree_context
from gracekv.tree import Prototype, PrototypeRule, TreeContext
from gracekv.tree.reference import ReferenceDistortion


def compare(context: TreeContext, distortion: Prototype, tolerance: float) -> None:
    bounds = context.partition.bounds.tolist()
    heads = context.prefill.kv_heads
    for layer in range(context.prefill.layers):
        seen = []
        for table in distortion.tables(context, layer):
            slots = table.batch.slots.tolist()
            for item in range(heads * len(slots)):
                head, slot = item // len(slots), slots[item % len(slots)]
                seen.append((head, slot))
                judge = ReferenceDistortion(context, layer, head, distortion)
                a, b = bounds[slot], bounds[slot + 1]
                assert float(table.drop[item]) == pytest.approx(judge.drop(a, b), rel=1e-4)
                at = torch.tensor(item)
                for i in range(a, b):
                    for j in range(i + 1, b + 1):
                        got = float(table.at(at, torch.tensor(i - a), torch.tensor(j - a)))
                        want = judge.node(i, j)
                        assert got == pytest.approx(want, rel=tolerance, abs=1e-8), (i, j)
                want = torch.tensor(judge.masses(a, b))
                got = table.masses(at[None], torch.tensor([b - a]))[0, : b - a]
                torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-9)
        assert sorted(seen) == [(h, s) for h in range(heads) for s in range(len(bounds) - 1)]


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
    context = tree_context(7)
    whole = list(Prototype(memory_limit=2**30).tables(context, 0))
    split = list(Prototype(memory_limit=2**20).tables(context, 0))
    gather = {}
    for table in split:
        for item in range(len(table.drop)):
            slot = int(table.batch.slots[item % len(table.batch.slots)])
            gather[item // len(table.batch.slots), slot] = table.distortion[item]
    for table in whole:
        for item in range(len(table.drop)):
            slot = int(table.batch.slots[item % len(table.batch.slots)])
            torch.testing.assert_close(
                table.distortion[item], gather[item // len(table.batch.slots), slot]
            )


def test_a_spike_beside_a_flat_interval_is_not_drowned() -> None:
    """Differences of running sums would lose the flat interval's mass (method-notes 4)."""
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
    for table in Prototype().tables(dataclasses.replace(context, prefill=still), 0):
        # The table's columns beyond a short slot's own list belong to padding.
        n = int(table.batch.lengths.min())
        assert float(table.distortion[:, : n * (n + 1) // 2].abs().max()) < 1e-6  # |M|^2 in fp32
