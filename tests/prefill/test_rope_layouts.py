"""Features that rotate in adjacent pairs, and layers that do not rotate at all."""

import dataclasses

import pytest
import torch

from gracekv.allocate import Budget
from gracekv.kernels.rope import Rope
from gracekv.pipeline import Pipeline
from gracekv.testing import synthetic_prefill
from gracekv.tree import Prototype
from gracekv.value.expected_attention import mean_rotation

DIM = 16


def interleaved(rope):
    return Rope(rope.cos, rope.sin, interleaved=True)


def pairs(partial):
    """A rotation of adjacent features, and the order in which its features form halves."""
    rope = interleaved(Rope.of_theta(40, int(DIM * partial)))
    return rope, rope.in_halves(DIM)[1]


@pytest.mark.parametrize("partial", [0.5, 1.0])
def test_pairs_rotate_as_halves_in_another_order(partial):
    rope, order = pairs(partial)
    x, at = torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(0)), torch.arange(5, 12)
    halves = Rope(rope.cos, rope.sin).rotate(x[..., order], at)
    torch.testing.assert_close(rope.rotate(x, at)[..., order], halves, rtol=0, atol=0)
    torch.testing.assert_close(rope.unrotate(rope.rotate(x, at), at), x, rtol=0, atol=1e-5)
    # Pair 0 rotates by the first angle: features 0 and 1, not 0 and d/2.
    first = torch.zeros(1, DIM)
    first[0, 0] = 1.0
    assert rope.rotate(first, torch.tensor([1]))[0].nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("partial", [0.5, 1.0])
def test_the_mean_rotation_is_that_of_the_table(partial):
    rope, _ = pairs(partial)
    x = torch.randn(1, DIM, generator=torch.Generator().manual_seed(1))
    turned = torch.cat([rope.rotate(x, torch.tensor([t])) for t in range(20, 30)]).mean(dim=0)
    torch.testing.assert_close((x @ mean_rotation(rope, DIM, 20, 10))[0], turned, rtol=0, atol=1e-5)


def test_no_rotation_leaves_everything_as_it_is():
    rope, x = Rope.none(9), torch.randn(2, 9, DIM)
    at = torch.arange(9)
    for made in (rope.rotate(x, at), rope.unrotate(x, at)):
        assert torch.equal(made, x)
    assert torch.equal(mean_rotation(rope, DIM, 5, 4), torch.eye(DIM))


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_trees_of_pairs_are_those_of_halves(engine):
    """The same model with its features in another order: the same distortions and merged keys."""
    plain = synthetic_prefill(dim=DIM)
    rope = interleaved(plain.rope)
    back = rope.in_halves(DIM)[1].argsort()
    keys, queries = (tuple(x[..., back] for x in own) for own in (plain.keys, plain.queries))
    other = dataclasses.replace(plain, rope=rope, keys=keys, queries=queries)
    pipeline = dataclasses.replace(Pipeline.named("gracekv"), distortion=Prototype(engine=engine))
    want, got = (pipeline.run(x, Budget.ratio(4)) for x in (plain, other))
    roots = len(want.forest.drop)
    torch.testing.assert_close(
        got.forest.distortion[:roots], want.forest.distortion[:roots], rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(got.forest.drop, want.forest.drop, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_trees_of_a_layer_without_rope_are_those_of_an_identity_table(engine):
    plain = synthetic_prefill(dim=DIM)
    still = Rope.none(plain.spans.length)
    pipeline = dataclasses.replace(Pipeline.named("gracekv"), distortion=Prototype(engine=engine))
    got = pipeline.run(dataclasses.replace(plain, unrotated=frozenset({1})), Budget.ratio(4))
    turned = pipeline.run(plain, Budget.ratio(4))
    none = pipeline.run(dataclasses.replace(plain, rope=still), Budget.ratio(4))
    roots, layers = len(got.forest.drop), plain.layers
    for layer, want in ((0, turned), (1, none)):
        own = torch.arange(roots) // (roots // layers) == layer
        got_roots, want_roots = (x.forest.distortion[:roots][own] for x in (got, want))
        torch.testing.assert_close(got_roots, want_roots, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(none.forest.distortion[:roots], turned.forest.distortion[:roots])
