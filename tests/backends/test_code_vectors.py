"""Codes, widened by vector instructions: equal to what they stand for."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from gracekv.backends import numba_codes as vectors  # noqa: E402


@numba.njit
def decoded(codes, s, z, by_channel, by_token):
    step = codes.shape[1]
    vectors.whole_by_channel(codes, 0, step, s, z, 4, 0, by_channel[0], 0, 16, len(codes))
    vectors.low_by_channel(codes, 0, step, s, z, 4, 0, by_channel[1], 0, 16, len(codes))
    vectors.high_by_channel(codes, 0, step, s, z, 4, 0, by_channel[2], 0, 16, len(codes))
    vectors.whole_by_token(codes, 0, step, s, z, 1, 3, by_token[0], 0, 16, len(codes))
    vectors.low_by_token(codes, 0, step, s, z, 1, 3, by_token[1], 0, 16, len(codes))
    vectors.high_by_token(codes, 0, step, s, z, 1, 3, by_token[2], 0, 16, len(codes))


def test_codes_of_rows_that_share_scales_and_of_rows_with_their_own():
    codes = np.arange(5 * 18, dtype=np.uint8).reshape(5, 18) * 7
    scale, zero = (np.random.default_rng(n).random(20, np.float32) for n in (1, 2))
    by_channel, by_token = (np.zeros((3, 5, 16), np.float32) for _ in range(2))

    decoded(codes, scale, zero, by_channel, by_token)

    read = codes[:, :16].astype(np.float64)
    for n, numbers in enumerate((read, read % 16, read // 16)):
        want = zero[4:20] + scale[4:20] * numbers
        np.testing.assert_allclose(by_channel[n], want, rtol=1e-6)
        own = [1 + 3 * r for r in range(5)]
        want = zero[own, None] + scale[own, None] * numbers
        np.testing.assert_allclose(by_token[n], want, rtol=1e-6)
