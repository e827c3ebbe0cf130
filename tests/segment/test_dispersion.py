import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.segment import curvature, reference
from gracekv.segment.curvature_dp import dispersion_table


def walks(layers: int, length: int, dim: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(length, dim, generator=rng).cumsum(0) for _ in range(layers)]


@given(
    layers=st.integers(1, 3),
    length=st.integers(1, 24),
    longest=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_matches_reference(layers, length, longest, seed):
    states = walks(layers, length, 4, seed)
    expected = torch.tensor(
        [
            [
                reference.dispersion(states, a, a + n, 1e-6) if a + n <= length else 0.0
                for n in range(1, longest + 1)
            ]
            for a in range(length)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(
        dispersion_table(states, longest, 1e-6), expected, rtol=1e-10, atol=1e-12
    )


def test_chunks_do_not_show(monkeypatch):
    states = walks(2, 100, 5, seed=0)
    whole = dispersion_table(states, 20, 1e-6)
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(dispersion_table(states, 20, 1e-6), whole, rtol=1e-10, atol=1e-12)
