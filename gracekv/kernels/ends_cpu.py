"""D of node ends in one compiled pass per node, for CPUs.

The equations are those of `gracekv.tree.prototype`; there each is a sweep over memory, here a
node's numbers never leave the cache. All loops over probes run over contiguous memory, so that the
compiler turns them into vector instructions. Sums over tokens go in the tokens' order, whatever
else is in the batch: a node's result depends on nothing but the node.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

_MAX_EXPONENT = np.float32(20.0)
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps its digits.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _dot(a: Any, b: Any, row: int, first: int) -> Any:
    """sum over i >= first of a_i b_{row, i}; a view for each call would cost more than the sum."""
    total = np.float32(0.0)
    for i in range(first, len(a)):
        total += a[i] * b[row, i]
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _row_dot(a: Any, at: int, b: Any, row: int, first: int) -> Any:
    """As `_dot`, of row `at` of a."""
    total = np.float32(0.0)
    for i in range(first, a.shape[1]):
        total += a[at, i] * b[row, i]
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _square(a: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * a[i]
    return total


@njit(nogil=True, cache=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _exp(x: Any, bits: Any, power: Any) -> None:
    """x <- e^x in place for float32 x <= 20; `power` is `bits` (int32) seen as float32."""
    for q in range(len(x)):
        y = max(x[q], _LEAST)
        n = np.floor(y * _LOG2_E + np.float32(0.5))
        r = y - n * _LN2_HIGH - n * _LN2_LOW
        s = np.float32(1.9875691500e-4)
        s = s * r + np.float32(1.3981999507e-3)
        s = s * r + np.float32(8.3334519073e-3)
        s = s * r + np.float32(4.1665795894e-2)
        s = s * r + np.float32(1.6666665459e-1)
        s = s * r + np.float32(5.0000001201e-1)
        x[q] = s * r * r + r + np.float32(1.0)
        bits[q] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for q in range(len(x)):
        x[q] *= power[q]


@njit(nogil=True, cache=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def node_ends(
    head: Any,
    first: Any,
    length: Any,
    lifted: Any,
    exponentials: Any,
    mass_of: Any,
    plain_keys: Any,
    key_norms: Any,
    values: Any,
    worth: Any,
    readers: Any,
    top: Any,
    inverse_total: Any,
    seeing: Any,
    before: Any,
    cos: Any,
    sin: Any,
    region_start: int,
    lambda_z: float,
    lambda_m: float,
    epsilon: float,
    uniform_base: float,
    rule_epsilon: float,
    multiplicity: bool,
    prefix: Any,
    suffix: Any,
    mass: Any,
    drop: Any,
) -> None:
    """Fill the `NodeEnds` of V nodes: `prefix`, `suffix`, `mass` [V, w] and `drop` [V], float32.

    Args:
        head: int64 [V].
        first: int64 [V], place of the node's first token in the region.
        length: int64 [V], tokens.
        lifted: int64 [V]: -1, or the token whose two sides are all that is asked for.
        exponentials: [U*N, P], and `mass_of`, `key_norms`, `worth` [U*N], `plain_keys`, `values`
            [U*N, d], `top`, `inverse_total` [U, P], `seeing` [N], `before` [N+1]: as in
            `gracekv.tree.probed.ProbedHeads`.
        readers: scaled queries [U, d, P].
        cos, sin: [T, d_rot] rotations of absolute positions.
        region_start: position of the region's first token.
        lambda_z, lambda_m, epsilon: weights of the distortion.
        uniform_base, rule_epsilon, multiplicity: how tokens merge.
    """
    probes, tokens, dim = exponentials.shape[1], len(seeing), values.shape[1]
    half = cos.shape[1] // 2
    widest = 0
    for v in range(len(length)):
        widest = max(widest, length[v])
    one, zero = np.float32(1.0), np.float32(0.0)
    lz, lm, eps = np.float32(lambda_z), np.float32(lambda_m), np.float32(epsilon)
    ub, reps = np.float32(uniform_base), np.float32(rule_epsilon)
    gram = np.empty((widest, widest), np.float32)
    columns = np.empty((dim, widest), np.float32)
    plain_sum, weighted_sum = np.empty(widest, np.float32), np.empty(widest, np.float32)
    share = np.empty(widest, np.float32)
    key_sum, rotated = np.empty(dim, np.float32), np.empty(dim, np.float32)
    z, z_tilde = np.empty(probes, np.float32), np.empty(probes, np.float32)
    m_square, m_dot_v = np.empty(probes, np.float32), np.empty(probes, np.float32)
    m_dot_new = np.empty(probes, np.float32)
    bits = np.empty(probes, np.int32)
    power = bits.view(np.float32)

    for v in range(len(length)):
        n, u = length[v], head[v]
        base_row = u * tokens + first[v]
        end = first[v] + n - 1

        # Gram matrix of the values, a row at a time over contiguous columns.
        for t in range(n):
            for i in range(dim):
                columns[i, t] = values[base_row + t, i]
        for t in range(n):
            for s in range(t + 1):
                gram[t, s] = zero
            i = 0
            while i + 8 <= dim:
                r = base_row + t
                x0, x1, x2, x3 = values[r, i], values[r, i + 1], values[r, i + 2], values[r, i + 3]
                i += 4
                x4, x5, x6, x7 = values[r, i], values[r, i + 1], values[r, i + 2], values[r, i + 3]
                i -= 4
                for s in range(t + 1):
                    gram[t, s] += (
                        x0 * columns[i, s]
                        + x1 * columns[i + 1, s]
                        + x2 * columns[i + 2, s]
                        + x3 * columns[i + 3, s]
                        + x4 * columns[i + 4, s]
                        + x5 * columns[i + 5, s]
                        + x6 * columns[i + 6, s]
                        + x7 * columns[i + 7, s]
                    )
                i += 8
            while i < dim:
                x = values[base_row + t, i]
                for s in range(t + 1):
                    gram[t, s] += x * columns[i, s]
                i += 1
            for s in range(t):
                gram[s, t] = gram[t, s]

        hidden = before[end]
        total_mass = zero
        if lifted[v] >= 0:
            pass
        elif before[first[v]] == hidden:
            for t in range(n):
                mass[v, t] = mass_of[base_row + t] / seeing[end]
                total_mass += mass[v, t]
        else:
            # Probes inside a node do not see its later tokens.
            for t in range(n):
                found = _row_dot(exponentials, base_row + t, inverse_total, u, hidden)
                mass[v, t] = found / seeing[end]
                total_mass += mass[v, t]
        drop[v] = total_mass

        for direction in range(2):
            z[:] = zero
            m_square[:] = zero
            key_sum[:] = zero
            plain_sum[:n] = zero
            weighted_sum[:n] = zero
            norm_sum, worth_sum = zero, zero
            columns_asked = n
            if lifted[v] >= 0:
                columns_asked = lifted[v] if direction == 0 else n - 1 - lifted[v]
            for j in range(columns_asked):
                asked = j > 0 and (lifted[v] < 0 or j == columns_asked - 1)
                t = j if direction == 0 else n - 1 - j
                low, high = (0, j) if direction == 0 else (n - 1 - j, n - 1)
                count = np.float32(j + 1)
                at, w = base_row + t, worth[base_row + t]
                norm_sum += key_norms[at]
                worth_sum += w
                for i in range(dim):
                    key_sum[i] += plain_keys[at, i]
                for s in range(n):
                    plain_sum[s] += gram[t, s]
                    weighted_sum[s] += w * gram[t, s]

                # Cross terms of |M|^2 with the new token, four tokens a round.
                for q in range(probes):
                    m_dot_new[q] = zero
                a, b = (low, high) if direction == 0 else (low + 1, high + 1)
                s = a
                while s + 4 <= b:
                    g0, g1, g2, g3 = gram[t, s], gram[t, s + 1], gram[t, s + 2], gram[t, s + 3]
                    r = base_row + s
                    for q in range(probes):
                        p0, p1 = exponentials[r, q], exponentials[r + 1, q]
                        p2, p3 = exponentials[r + 2, q], exponentials[r + 3, q]
                        m_dot_new[q] += g0 * p0 + g1 * p1 + g2 * p2 + g3 * p3
                    s += 4
                while s < b:
                    g0 = gram[t, s]
                    for q in range(probes):
                        m_dot_new[q] += g0 * exponentials[base_row + s, q]
                    s += 1
                diagonal = gram[t, t]
                for q in range(probes):
                    x = exponentials[at, q]
                    z[q] += x
                    m_square[q] += x * (np.float32(2.0) * m_dot_new[q] + x * diagonal)
                if not asked:
                    continue
                # v~ = sum_t w_t v_t with normalised weights; share_s = v~.v_s.
                if worth_sum > zero:
                    base = ub * worth_sum / count
                    scale = one / (worth_sum + base * count + reps)
                    mix = one
                else:
                    base, scale, mix = one, one / count, zero
                v_square = zero
                for s in range(low, high + 1):
                    share[s] = scale * (mix * weighted_sum[s] + base * plain_sum[s])
                    v_square += scale * (mix * worth[base_row + s] + base) * share[s]
                for q in range(probes):
                    m_dot_v[q] = zero
                s = low
                while s + 4 <= high + 1:
                    h0, h1, h2, h3 = share[s], share[s + 1], share[s + 2], share[s + 3]
                    r = base_row + s
                    for q in range(probes):
                        p0, p1 = exponentials[r, q], exponentials[r + 1, q]
                        p2, p3 = exponentials[r + 2, q], exponentials[r + 3, q]
                        m_dot_v[q] += h0 * p0 + h1 * p1 + h2 * p2 + h3 * p3
                    s += 4
                while s <= high:
                    h0 = share[s]
                    for q in range(probes):
                        m_dot_v[q] += h0 * exponentials[base_row + s, q]
                    s += 1

                # The prototype's logit: mean key, rotated to the middle, log multiplicity.
                square = _square(key_sum)
                log_m = zero
                if multiplicity:
                    coherence = (math.sqrt(square) / count) / (norm_sum / count + reps)
                    effective = min(max(count * coherence * coherence, one), count)
                    log_m = np.float32(math.log(effective))
                both = 2 * (first[v] + region_start) + low + high
                middle = both // 2
                middle += (both % 2) * (middle % 2)
                for i in range(half):
                    x, y = key_sum[i] / count, key_sum[i + half] / count
                    rotated[i] = x * cos[middle, i] - y * sin[middle, i]
                    rotated[i + half] = y * cos[middle, i + half] + x * sin[middle, i + half]
                for i in range(2 * half, dim):
                    rotated[i] = key_sum[i] / count
                for q in range(probes):
                    z_tilde[q] = log_m - top[u, q]
                i = 0
                while i + 8 <= dim:
                    k0, k1, k2, k3 = rotated[i], rotated[i + 1], rotated[i + 2], rotated[i + 3]
                    i += 4
                    k4, k5, k6, k7 = rotated[i], rotated[i + 1], rotated[i + 2], rotated[i + 3]
                    i -= 4
                    for q in range(probes):
                        z_tilde[q] += (
                            k0 * readers[u, i, q]
                            + k1 * readers[u, i + 1, q]
                            + k2 * readers[u, i + 2, q]
                            + k3 * readers[u, i + 3, q]
                            + k4 * readers[u, i + 4, q]
                            + k5 * readers[u, i + 5, q]
                            + k6 * readers[u, i + 6, q]
                            + k7 * readers[u, i + 7, q]
                        )
                    i += 8
                while i < dim:
                    for q in range(probes):
                        z_tilde[q] += rotated[i] * readers[u, i, q]
                    i += 1
                for q in range(probes):
                    z_tilde[q] = min(z_tilde[q], _MAX_EXPONENT)
                _exp(z_tilde, bits, power)

                for q in range(probes):
                    x, y, square_q = z[q], z_tilde[q], max(m_square[q], zero)
                    m_error = m_square[q] + y * (y * v_square - np.float32(2.0) * m_dot_v[q])
                    m_error = lm * max(m_error, zero) / (square_q + eps)
                    z_error = lz * (x - y) * (x - y) / (x * x + eps)
                    z_tilde[q] = x * (m_error + z_error)
                last = end if direction else first[v] + t
                seen = before[last]
                found = _dot(z_tilde, inverse_total, u, seen) / seeing[last]
                if direction == 0:
                    prefix[v, j] = found
                else:
                    suffix[v, t] = found
        prefix[v, 0] = zero
        suffix[v, n - 1] = zero
