import numpy as np
import pytest
import torch
from hypothesis import given

from gracekv.errors import MissingCaptureError, NonFiniteError
from gracekv.prefill import Needs, depth_layers
from gracekv.segment import Curvature, curvature, reference
from gracekv.segment.curvature import BlockInput, band_products, unit_states
from gracekv.testing import synthetic_prefill
from support.draws import SEEDS, ints, lists, some


def trajectories(layers: int, length: int, dim: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(length, dim, generator=rng, dtype=torch.float64).cumsum(0)
        + torch.randn(dim, generator=rng, dtype=torch.float64)
        for _ in range(layers)
    ]


@given(
    layers=ints(1, 3), length=ints(2, 70), dim=ints(2, 6),
    windows=lists(ints(1, 17), min_size=1, max_size=3, unique=True),
    stability=some([0.0, 0.25, 1.0]), seed=SEEDS,
)  # fmt: skip
def test_matches_reference(layers, length, dim, windows, stability, seed):
    rule = Curvature(windows=tuple(windows), stability=stability)
    states = trajectories(layers, length, dim, seed)
    expected = reference.stable_curvature(states, rule)
    np.testing.assert_allclose(rule.of_states(states).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_states_are_read_exactly(dtype):
    states = [hidden.to(dtype) for hidden in trajectories(2, 60, 8, seed=3)]
    expected = reference.stable_curvature(states, Curvature())
    np.testing.assert_allclose(Curvature().of_states(states).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("chunk_bytes", [1, 40_000])
def test_chunks_do_not_show(chunk_bytes, monkeypatch):
    states = trajectories(2, 150, 5, seed=1)
    whole = Curvature().of_states(states)
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", chunk_bytes)
    torch.testing.assert_close(Curvature().of_states(states), whole, rtol=1e-11, atol=1e-11)


def test_a_flat_stretch_beside_a_spike_has_curvature_one():
    # Both directions vanish there; the division would amplify noise from the spike.
    hidden = torch.ones(60, 4)
    hidden[10] = torch.tensor([1e4, -1e4, 3.0, 5.0])
    kappa = Curvature().of_states([hidden])
    torch.testing.assert_close(kappa[30:44], torch.ones(14, dtype=torch.float64))


def test_reads_the_sampled_layers_of_a_prefill():
    prefill = synthetic_prefill(layers=6)
    rule = Curvature(depths=(0.0, 0.5, 0.5, 1.0))
    expected = rule.of_states([prefill.observation(BlockInput(layer / 6)) for layer in (0, 3, 5)])
    torch.testing.assert_close(rule(prefill), expected, rtol=0, atol=0)
    assert rule.needs() == Needs.observed(*map(BlockInput, (0.0, 0.5, 1.0)))


def test_every_layer_has_a_depth():
    for layers in range(1, 200):
        for layer in range(layers):
            assert depth_layers([layer / layers], layers) == (layer,)
        for percent in (33, 50, 67, 75):
            assert depth_layers([percent / 100], layers) == (percent * layers // 100,)


def test_refuses_missing_states():
    prefill = synthetic_prefill(layers=4)
    with pytest.raises(MissingCaptureError, match=r"BlockInput\(depth=0.33\)"):
        Curvature()(prefill.without(BlockInput))


@given(rows=ints(1, 150), width=ints(1, 140), seed=SEEDS)
def test_band_holds_the_upper_diagonals_of_the_gram_matrix(rows, width, seed):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gram = torch.nn.functional.pad(x @ x.T, (0, width))
    expected = torch.stack([gram[t, t : t + width] for t in range(rows)])
    torch.testing.assert_close(band_products(x, width), expected)
    around = torch.nn.functional.pad(x, (0, 0, 2, 3))
    torch.testing.assert_close(band_products(x, width, 2, 3), band_products(around, width))


def test_rows_have_unit_norm_unless_they_are_tiny():
    hidden = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-8, 4e-8]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.03, 0.04]], dtype=torch.float64)
    torch.testing.assert_close(unit_states(hidden, 1e-6), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_states_that_are_not_finite(bad):
    hidden = torch.ones(5, 4, dtype=torch.float16)
    hidden[3, 1] = bad
    with pytest.raises(NonFiniteError, match="try bfloat16"):
        Curvature().of_states([torch.ones(5, 4), hidden])


def test_large_half_precision_states_do_not_overflow():
    hidden = torch.full((2, 4), 60_000.0, dtype=torch.float16)
    want = torch.full((2, 4), 0.5, dtype=torch.float64)
    torch.testing.assert_close(unit_states(hidden, 1e-6), want)
