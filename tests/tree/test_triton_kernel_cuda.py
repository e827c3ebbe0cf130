"""The Triton distortion on a GPU: everything that needs one."""

import pytest
import torch

from gracekv.kernels.device import obstacle
from gracekv.tree import IntervalCosts, Prototype
from support.interval_costs import assert_same_costs, evaluator_of, some_nodes
from support.trees import assert_same_growth, in_slots, tree_context

REASON = obstacle(torch.device("cuda"), "engine 'torch'")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no GPU here: {REASON}")


def slots_of(seed, size, device="cuda", **shape):
    return in_slots(tree_context(seed, device=device, **shape), size)


def on_cpu(costs):
    return IntervalCosts(costs.costs.cpu(), costs.mass.cpu(), costs.drop.cpu())


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("longest", [16, 33, 700])
def test_equals_the_torch_engine(dim, longest):
    # Both engines on the same exponentials: those of the GPU, whose rounding differs.
    context = slots_of(dim + longest, longest, context=1500, dim=dim)
    evaluator, batch = evaluator_of(context, "triton")
    rng = torch.Generator().manual_seed(dim)
    nodes = some_nodes(batch, dim, torch.randint(1, longest + 1, (300,), generator=rng).tolist())
    assert_same_costs(evaluator(nodes), evaluator_of(context, "torch")[0](nodes), nodes)


def test_equals_the_cpu():
    got, batch = evaluator_of(slots_of(1, 97, context=500, dim=64), "triton")
    want, near = evaluator_of(slots_of(1, 97, context=500, dim=64, device="cpu"), "torch")
    lengths = list(range(1, 98))
    nodes = some_nodes(near, 1, lengths)
    assert_same_costs(
        on_cpu(got(some_nodes(batch, 1, lengths))), want(nodes), nodes, tolerance=1e-3, floor=1e-7
    )


def test_more_probes_than_a_program_takes():
    context = slots_of(2, 60, context=300, dim=128)
    distortion = Prototype(evidence_slots=3, evidence_per_slot=50)
    evaluator, batch = evaluator_of(context, "triton", distortion)
    nodes = some_nodes(batch, 2, list(range(1, 61)))
    assert_same_costs(evaluator(nodes), evaluator_of(context, "torch", distortion)[0](nodes), nodes)


def test_repeats_to_the_bit():
    evaluator, batch = evaluator_of(slots_of(3, 64, context=2000, dim=128), "triton")
    nodes = some_nodes(batch, 3, [64] * 500)
    first = evaluator(nodes)
    # Elements behind a shorter node's last token are not written.
    written = torch.arange(64, device="cuda") < nodes.length[:, None]
    for _ in range(20):
        again = evaluator(nodes)
        for name in ("prefix", "suffix", "mass"):
            got, want = getattr(again, name), getattr(first, name)
            assert torch.equal(got[written], want[written]), name
        assert torch.equal(again.drop, first.drop)


def test_auto_takes_it_and_grows_the_same_trees():
    context = tree_context(4, device="cuda")
    assert type(evaluator_of(context, "auto")[0]).__name__ == "TritonEvaluator"
    assert_same_growth(context, "auto")
