"""D of node ends against the equations in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import BackendUnavailableError, ConfigError
from gracekv.prefill import Prefill
from gracekv.segment import Partition
from gracekv.testing.trees import tree_context
from gracekv.tree import DistortionEvaluator, Items, Nodes, Prototype, PrototypeRule, TreeContext
from gracekv.tree.reference import ReferenceDistortion
from gracekv.tree.workspace import Workspace


def evaluator_of(
    context: TreeContext, distortion: Prototype, layers: list[int]
) -> tuple[DistortionEvaluator, Items]:
    items = Items.of(context, layers)
    return distortion.evaluator(context, layers, items, Workspace(torch.device("cpu"))), items


def compare(context: TreeContext, distortion: Prototype, tolerance: float) -> None:
    """Both engines against the definitions, in every head."""
    bounds, slots = context.partition.bounds.tolist(), context.partition.slots
    for layer in range(context.prefill.layers):
        evaluators = [
            evaluator_of(context, dataclasses.replace(distortion, engine=engine), [layer])[0]
            for engine in ("torch", "numba")
        ]
        for item in range(context.prefill.kv_heads * slots):
            reference = ReferenceDistortion(context, layer, item // slots, distortion)
            a, b = bounds[item % slots], bounds[item % slots + 1]
            # Nodes of every start and of every end, narrower ones padded; together their prefixes,
            # and again their suffixes, are all intervals of the slot.
            spans = [(i, b) for i in range(a, b)] + [(a, j) for j in range(a + 1, b)]
            want = {(i, j): reference.node(i, j) for i in range(a, b) for j in range(i + 1, b + 1)}
            drops = torch.tensor([reference.drop(i, j) for i, j in spans])
            mass = torch.tensor(reference.masses(a, b)).double()
            at = torch.tensor(spans) - a
            for evaluator in evaluators:
                ends = evaluator(Nodes(torch.full((len(spans),), item), at[:, 0], at[:, 1]))
                torch.testing.assert_close(ends.drop, drops.float(), rtol=1e-4, atol=0)
                torch.testing.assert_close(
                    ends.mass[0, : b - a].double(), mass, rtol=1e-4, atol=1e-9
                )
                for row, (i, j) in enumerate(spans):
                    for k in range(j - i):
                        assert float(ends.prefix[row, k]) == pytest.approx(
                            want[i, i + k + 1], rel=tolerance, abs=1e-8
                        ), (i, i + k + 1)
                        assert float(ends.suffix[row, k]) == pytest.approx(
                            want[i + k, j], rel=tolerance, abs=1e-8
                        ), (i + k, j)


@settings(max_examples=3)
@given(seed=st.integers(0, 10_000), group=st.integers(1, 3))
def test_ends_match_the_definitions(seed: int, group: int) -> None:
    # fp32 products of exponentials against float64 definitions; the notes promise 5e-5.
    compare(tree_context(seed, group=group, context=30), Prototype(), tolerance=2e-4)


def test_every_term_and_option_reaches_the_ends() -> None:
    context = tree_context(3, context=24, layers=1)
    for distortion in (
        Prototype(lambda_z=1.0, lambda_m=0.0),
        Prototype(lambda_z=0.0, lambda_m=1.0),
        Prototype(evidence_slots=0),
        Prototype(question_probes=2, tail_probes=1, evidence_slots=2, evidence_per_slot=1),
    ):
        compare(context, distortion, tolerance=2e-4)
    flat = dataclasses.replace(context, rule=PrototypeRule(uniform_base=1.0, multiplicity=False))
    compare(flat, Prototype(), tolerance=2e-4)


def test_chunks_do_not_change_the_ends() -> None:
    context = tree_context(7, context=400)
    region = context.partition.region
    even = Partition(torch.arange(region.start, region.end + 1, region.length // 20))
    context = dataclasses.replace(context, partition=even)
    ends = []
    for limit in (2**20, 2**30):
        evaluator, items = evaluator_of(
            context, Prototype(memory_limit=limit, engine="torch"), [0, 1]
        )
        item = torch.arange(len(items.origin))
        ends.append(evaluator(Nodes(item, torch.zeros_like(item), items.length)))
    whole = items.length.max() == items.length
    for name in ("prefix", "suffix", "mass", "drop"):
        torch.testing.assert_close(
            getattr(ends[0], name)[whole], getattr(ends[1], name)[whole], msg=name
        )


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
    evaluator, items = evaluator_of(dataclasses.replace(context, prefill=still), Prototype(), [0])
    item = torch.arange(len(items.origin))
    ends = evaluator(Nodes(item, torch.zeros_like(item), items.length))
    real = torch.arange(ends.prefix.shape[1]) < items.length[:, None]
    assert float(ends.prefix[real].abs().max()) < 1e-6  # |M|^2 in fp32
    assert float(ends.suffix[real].abs().max()) < 1e-6


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    context = tree_context(2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"gracekv\[cpu\]"):
        evaluator_of(context, Prototype(engine="numba"), [0])
    evaluator_of(context, Prototype(), [0])
    with pytest.raises(ConfigError, match="auto, numba, torch"):
        Prototype(engine="fast")  # type: ignore[arg-type]
