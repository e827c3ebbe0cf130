"""D of intervals that begin or end where their node does, compiled: one node at a time.

The equations are those of `gracekv.tree.prototype_torch`; there each is a sweep over memory, here a
node's numbers never leave the cache. A node is read forwards for its prefixes and backwards for its
suffixes. What is asked for is gathered, and products with all probes are taken for many intervals
at once. An interval's D depends on its node alone, to the bit, and not on what else is asked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.exponential_cpu import exponential
from gracekv.kernels.node_data_cpu import WAITING
from gracekv.kernels.products_cpu import COLUMNS, multiply

_MAX_EXPONENT = np.float32(20.0)


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _dot(a: Any, at: int, b: Any, row: int, first: int, stop: int) -> Any:
    """sum over first <= i < stop of a_{at, i} b_{row, i}; views would cost more than the sum."""
    total = np.float32(0.0)
    for i in range(first, stop):
        total += a[at, i] * b[row, i]
    return total


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _norm(a: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * a[i]
    return math.sqrt(total)


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _agreement(shares: Any, at: int, worth: Any, full: int, mix: Any, base: Any) -> Any:
    """sum over s < full of (mix worth_s + base) share_s."""
    total = np.float32(0.0)
    for i in range(full):
        total += (mix * worth[i] + base) * shares[at, i]
    return total


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _seen(errors: Any, at: int, inverse_total: Any, u: int, first: int, stop: int) -> Any:
    """sum over first <= q < stop of errors_q / Z_q; what lies beside may be anything."""
    total, zero = np.float32(0.0), np.float32(0.0)
    for q in range(errors.shape[1]):
        total += (errors[at, q] if first <= q < stop else zero) * inverse_total[u, q]
    return total


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _rotate(key: Any, factor: Any, cos: Any, sin: Any, place: int, keys: Any, at: int) -> None:
    """keys[at] <- `factor` times key [d], rotated to the position `place`."""
    half = cos.shape[1] // 2
    for j in range(half):
        x, y = key[j] * factor, key[j + half] * factor
        keys[at, j] = x * cos[place, j] - y * sin[place, j]
        keys[at, j + half] = y * cos[place, j + half] + x * sin[place, j + half]
    for j in range(2 * half, len(key)):
        keys[at, j] = key[j] * factor


@njit(nogil=True)  # type: ignore[untyped-decorator]
def masses(node: Any, heads: Any, mass: Any) -> Any:
    """Fill mass [n]: mean normalised probe mass of each token; returns their sum."""
    exponentials, inverse_total, all_masses = heads.exponentials, heads.inverse_total, heads.mass
    last, row = node.first + node.length - 1, node.row
    hidden, seeing = heads.before[last], heads.seeing[last]
    total = np.float32(0.0)
    # Probes inside a node do not see its later tokens.
    crossed = heads.before[node.first] != hidden
    for t in range(node.length):
        found = all_masses[row + t]
        if crossed:
            probes = exponentials.shape[1]
            found = _dot(exponentials, row + t, inverse_total, node.head, hidden, probes)
        mass[t] = found / seeing
        total += mass[t]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def gather(node: Any, heads: Any, space: Any) -> None:
    """Copy what is read of the node again and again, and make the Gram matrix of its values."""
    exponentials, values, columns, p = heads.exponentials, heads.values, space.columns, space.p
    all_worth, worth = heads.worth, space.worth
    n, row, dim, wide = node.length, node.row, values.shape[1], space.gram.shape[1]
    for t in range(n):
        for q in range(exponentials.shape[1]):
            p[t, q] = exponentials[row + t, q]
        for i in range(dim):
            columns[i, t] = values[row + t, i]
        worth[t] = all_worth[row + t]
    # Columns behind the node hold what was there before: they are multiplied, and never read.
    multiply(
        values.ctypes.data + 4 * row * dim, dim, n, columns.ctypes.data, wide,
        space.gram.ctypes.data, wide, 0, dim, (n + COLUMNS - 1) // COLUMNS * COLUMNS,
    )  # fmt: skip


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def read(
    node: Any, heads: Any, space: Any, backwards: bool, asked: Any, found: Any, waiting: int
) -> int:
    """Ask for D of prefixes (or suffixes) of a gathered node; returns how many wait.

    Args:
        node, heads, space: `gather` was called with them.
        backwards: whether suffixes are meant.
        asked: bool [n]: of the tokens up to k and including it (of those from k on).
        found: float32 [2, n]: D of prefixes and suffixes, filled by this and `settle`.
        waiting: how many intervals wait in `space` already.
    """
    # Arrays by names of their own: a field of a tuple is counted at every use.
    p, gram, cross, crossed = space.p, space.gram, space.cross, space.crossed
    z, square, key, plain, weighted = (
        space.z, space.square, space.key, space.plain, space.weighted,
    )  # fmt: skip
    zs, squares, shares, keys, spans, worth = (
        space.zs, space.squares, space.shares, space.keys, space.spans, space.worth,
    )  # fmt: skip
    log_ms, v_squares = space.log_m, space.v_square
    key_norms, plain_keys, cos, sin = heads.key_norms, heads.plain_keys, heads.cos, heads.sin
    n, row, wide, padded = node.length, node.row, gram.shape[1], p.shape[1]
    full = (n + COLUMNS - 1) // COLUMNS * COLUMNS
    dim = plain_keys.shape[1]
    one, two, zero = np.float32(1.0), np.float32(2.0), np.float32(0.0)
    stop = 0
    for j in range(1, n):
        if asked[n - 1 - j if backwards else j]:
            stop = j + 1
    if stop == 0:
        return waiting
    z[:] = zero
    square[:] = zero
    key[:] = zero
    plain[:full] = zero
    weighted[:full] = zero
    norm_sum, worth_sum = zero, zero
    for j in range(stop):
        t = n - 1 - j if backwards else j
        if j % 4 == 0:
            # Cross terms of |M|^2 of this token and the next three with those before them.
            rows = min(4, stop - j)
            low, high = (n - j - rows + 1, n) if backwards else (0, j + rows - 1)
            for r in range(rows):
                reader = t - r if backwards else t + r
                for i in range(full):
                    earlier = i > reader if backwards else i < reader
                    cross[r, i] = gram[reader, i] if earlier else zero
            multiply(
                cross.ctypes.data, wide, rows, p.ctypes.data, padded, crossed.ctypes.data, padded,
                low, high, padded,
            )  # fmt: skip
        count = np.float32(j + 1)
        at, diagonal = row + t, gram[t, t]
        w = worth[t]
        norm_sum += key_norms[at]
        worth_sum += w
        for i in range(dim):
            key[i] += plain_keys[at, i]
        for i in range(full):
            plain[i] += gram[t, i]
            weighted[i] += w * gram[t, i]
        r = j % 4
        for i in range(padded):
            x = p[t, i]
            z[i] += x
            square[i] += x * (two * crossed[r, i] + x * diagonal)
        if j == 0 or not asked[t]:
            continue

        low, high = (t, n - 1) if backwards else (0, t)
        for i in range(padded):
            zs[waiting, i] = z[i]
            squares[waiting, i] = square[i]
        # v~ = sum_t w_t v_t with normalised weights; share_s = v~.v_s.
        if worth_sum > zero:
            base = heads.uniform_base * worth_sum / count
            scale = one / (worth_sum + base * count + heads.rule_epsilon)
            mix = one
        else:
            base, scale, mix = one, one / count, zero
        for i in range(full):
            share = scale * (mix * weighted[i] + base * plain[i])
            shares[waiting, i] = share if low <= i <= high else zero
        v_squares[waiting] = scale * _agreement(shares, waiting, worth, full, mix, base)
        # The prototype's key: their mean, rotated to the middle, with a log multiplicity.
        log_m = zero
        if heads.multiplicity:
            coherence = (_norm(key) / count) / (norm_sum / count + heads.rule_epsilon)
            log_m = np.float32(math.log(min(max(count * coherence * coherence, one), count)))
        log_ms[waiting] = log_m
        both = 2 * (node.first + heads.region_start) + low + high
        middle = both // 2
        middle += (both % 2) * (middle % 2)
        _rotate(key, one / count, cos, sin, middle, keys, waiting)
        spans[waiting, 0], spans[waiting, 1] = low, high
        spans[waiting, 2], spans[waiting, 3] = 1 if backwards else 0, t
        waiting += 1
        if waiting == WAITING:
            settle(node, heads, space, found, waiting)
            waiting = 0
    return waiting


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def settle(node: Any, heads: Any, space: Any, found: Any, waiting: int) -> None:
    """Find D of the intervals that wait."""
    p, zs, squares, logits, mixed = space.p, space.zs, space.squares, space.logits, space.mixed
    shares, keys, spans, bits = space.shares, space.keys, space.spans, space.bits
    log_m, v_squares, power = space.log_m, space.v_square, space.bits.view(np.float32)
    top, inverse_total, readers = heads.top, heads.inverse_total, heads.readers
    before, seeing = heads.before, heads.seeing
    lambda_z, lambda_m, epsilon = heads.lambda_z, heads.lambda_m, heads.epsilon
    wide, padded, dim = shares.shape[1], p.shape[1], keys.shape[1]
    probes, u, first = heads.exponentials.shape[1], node.head, node.first
    zero, two = np.float32(0.0), np.float32(2.0)
    multiply(
        keys.ctypes.data, dim, waiting, readers.ctypes.data + 4 * u * dim * padded, padded,
        logits.ctypes.data, padded, 0, dim, padded,
    )  # fmt: skip
    for r in range(0, waiting, 4):
        rows = min(4, waiting - r)
        low, high = spans[r, 0], spans[r, 1]
        for s in range(r + 1, r + rows):
            low, high = min(low, spans[s, 0]), max(high, spans[s, 1])
        multiply(
            shares.ctypes.data + 4 * r * wide, wide, rows, p.ctypes.data, padded,
            mixed.ctypes.data + 4 * r * padded, padded, low, high + 1, padded,
        )  # fmt: skip
    for r in range(waiting):
        more = log_m[r]
        for i in range(padded):
            logit = logits[r, i] + (more - top[u, i])
            logits[r, i] = min(logit, _MAX_EXPONENT)
    whole = waiting * padded
    exponential(logits.reshape(-1)[:whole], bits.reshape(-1)[:whole], power.reshape(-1)[:whole])
    for r in range(waiting):
        v_square = v_squares[r]
        for q in range(padded):
            x, y, x_square = zs[r, q], logits[r, q], squares[r, q]
            m_error = x_square + y * (y * v_square - two * mixed[r, q])
            m_error = lambda_m * max(m_error, zero) / (max(x_square, zero) + epsilon)
            z_error = lambda_z * (x - y) * (x - y) / (x * x + epsilon)
            logits[r, q] = x * (m_error + z_error)
        last = first + spans[r, 1]
        # Only probes that see all of the interval are asked, and no padding ever is.
        seen = _seen(logits, r, inverse_total, u, before[last], probes)
        found[spans[r, 2], spans[r, 3]] = seen / seeing[last]
