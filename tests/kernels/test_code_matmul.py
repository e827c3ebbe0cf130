"""Products with codes that are not dequantised: equal to those of dequantised numbers."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from gracekv.kernels.code_matmul import dot_codes, mix_codes, scaled  # noqa: E402

RNG = np.random.default_rng(3)


def numbers_of(codes, bits):
    """float64: codes around the middle of their range; of 4 bits low halves, then high ones."""
    if bits == 4:
        codes = np.concatenate([codes % 16, codes // 16], axis=1)
    return codes.astype(np.float64) - 2 ** (bits - 1)


@numba.njit
def fold(x, scale, zero, out):
    return scaled(x, 2, scale, zero, 3, 32, out, 5)


def test_scales_go_into_queries():
    x, scale, zero = (RNG.standard_normal(40).astype(np.float32) for _ in range(3))
    out = np.zeros(40, np.float32)

    total = fold(x, scale, zero, out)

    np.testing.assert_allclose(total, x[2:34].astype(float) @ zero[3:35], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[5:37], x[2:34] * scale[3:35])
    assert not out[:5].any()
    assert not out[37:].any()


@numba.njit
def dots(bits, count, query, codes, dim, base, out):
    step = codes.shape[1]
    dot_codes(
        bits, count, query, query.shape[1], query.shape[1], codes, 2 * step, step, dim, base, 1,
        out, out.shape[1] + 3, out.shape[1],
    )  # fmt: skip


@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_logits_of_four_rows(bits, dim, count):
    # Beyond three, the first three are served.
    served = min(count, 3)
    query = RNG.standard_normal((5, dim + 4)).astype(np.float32)
    codes = RNG.integers(0, 256, (7, dim * bits // 8)).astype(np.uint8)
    base, out = RNG.standard_normal(9).astype(np.float32), np.zeros((5, 9), np.float32)

    dots(bits, count, query, codes, dim, base, out)

    want = np.zeros((5, 9))
    keys = numbers_of(codes[2:6], bits)
    want[1 : 1 + served, 3:7] = query[1 : 1 + served, :dim] @ keys.T
    want[1 : 1 + served, 3:7] += base[1 : 1 + served, None]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-3 if bits == 8 else 2e-4)


@numba.njit
def mixes(bits, count, weights, codes, rows, out, apart):
    step, stride = codes.shape[1], weights.shape[1]
    mix_codes(
        bits, count, weights, 1, 20, stride, codes, step, step, rows, out, 2, apart, out.shape[1]
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_pair_of_vectors_is_mixed(bits, count, rows):
    served = min(count, 3)
    weights = RNG.random((4, 40)).astype(np.float32)
    codes = RNG.integers(0, 256, (20, 32)).astype(np.uint8)
    before = RNG.standard_normal((4, 60)).astype(np.float32)
    out = before.copy()

    mixes(bits, count, weights, codes, rows, out, 24)

    of = codes[1 : 1 + rows] if bits == 8 else codes[1 : 1 + rows, :16]
    read, want = numbers_of(of, bits), before.astype(np.float64)
    want[:served, 2:18] += weights[:served, 1 : 1 + rows] @ read[:, :16]
    want[:served, 26:42] += weights[:served, 20 : 20 + rows] @ read[:, 16:]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-3 if bits == 8 else 2e-4)
