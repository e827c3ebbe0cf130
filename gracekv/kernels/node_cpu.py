"""D of intervals that begin or end where their node does, compiled: one node at a time.

The equations are those of `gracekv.tree.prototype`; there each is a sweep over memory, here a
node's numbers never leave the cache. A node is read forwards for its prefixes and backwards for its
suffixes. What is asked for is gathered, and products with all probes are taken for many intervals
at once. Sums over tokens go in the tokens' order, so that an interval's D depends on its node
alone, and not on what else is asked.
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


@njit(nogil=True)  # type: ignore[untyped-decorator]
def masses(node: Any, heads: Any, mass: Any) -> Any:
    """Fill mass [n]: mean normalised probe mass of each token; returns their sum."""
    last = node.first + node.length - 1
    hidden, probes = heads.before[last], heads.exponentials.shape[1]
    total = np.float32(0.0)
    # Probes inside a node do not see its later tokens.
    crossed = heads.before[node.first] != hidden
    for t in range(node.length):
        found = heads.mass[node.row + t]
        if crossed:
            found = _dot(
                heads.exponentials, node.row + t, heads.inverse_total, node.head, hidden, probes
            )
        mass[t] = found / heads.seeing[last]
        total += mass[t]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def gather(node: Any, heads: Any, space: Any) -> None:
    """Copy the node's exponentials, and make the Gram matrix of its values."""
    n, dim, probes = node.length, heads.values.shape[1], heads.exponentials.shape[1]
    full = (n + COLUMNS - 1) // COLUMNS * COLUMNS
    wide = space.gram.shape[1]
    for t in range(n):
        for q in range(probes):
            space.p[t, q] = heads.exponentials[node.row + t, q]
        for i in range(dim):
            space.columns[i, t] = heads.values[node.row + t, i]
    for t in range(n, full):
        for i in range(dim):
            space.columns[i, t] = np.float32(0.0)
    for t in range(0, n, 4):
        rows = min(4, n - t)
        multiply(
            heads.values.ctypes.data + 4 * (node.row + t) * dim, dim, rows,
            space.columns.ctypes.data, wide, space.gram.ctypes.data + 4 * t * wide, wide, 0, dim,
            min((t + rows + COLUMNS - 1) // COLUMNS * COLUMNS, full),
        )  # fmt: skip
    for t in range(n):
        for s in range(t):
            space.gram[s, t] = space.gram[t, s]


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
    n, width, padded = node.length, space.p.shape[0], space.p.shape[1]
    dim, half = heads.values.shape[1], heads.cos.shape[1] // 2
    one, zero = np.float32(1.0), np.float32(0.0)
    stop = 0
    for j in range(1, n):
        if asked[n - 1 - j if backwards else j]:
            stop = j + 1
    if stop == 0:
        return waiting
    space.z[:] = zero
    space.square[:] = zero
    space.key[:] = zero
    space.plain[:n] = zero
    space.weighted[:n] = zero
    norm_sum, worth_sum = zero, zero
    for j in range(stop):
        t = n - 1 - j if backwards else j
        if j % 4 == 0:
            # Cross terms of |M|^2 of this token and the next three with those before them.
            rows = min(4, stop - j)
            low, high = (n - j - rows + 1, n) if backwards else (0, j + rows - 1)
            for r in range(rows):
                reader = t - r if backwards else t + r
                for s in range(low, high):
                    earlier = s > reader if backwards else s < reader
                    space.cross[r, s] = space.gram[reader, s] if earlier else zero
            multiply(
                space.cross.ctypes.data, width, rows, space.p.ctypes.data, padded,
                space.crossed.ctypes.data, padded, low, high, padded,
            )  # fmt: skip
        count = np.float32(j + 1)
        at, diagonal = node.row + t, space.gram[t, t]
        w = heads.worth[at]
        norm_sum += heads.key_norms[at]
        worth_sum += w
        for i in range(dim):
            space.key[i] += heads.plain_keys[at, i]
        for s in range(n):
            space.plain[s] += space.gram[t, s]
            space.weighted[s] += w * space.gram[t, s]
        r = j % 4
        for q in range(padded):
            x = space.p[t, q]
            space.z[q] += x
            space.square[q] += x * (np.float32(2.0) * space.crossed[r, q] + x * diagonal)
        if j == 0 or not asked[t]:
            continue

        low, high = (t, n - 1) if backwards else (0, t)
        for q in range(padded):
            space.zs[waiting, q] = space.z[q]
            space.squares[waiting, q] = space.square[q]
        # v~ = sum_t w_t v_t with normalised weights; share_s = v~.v_s.
        if worth_sum > zero:
            base = heads.uniform_base * worth_sum / count
            scale = one / (worth_sum + base * count + heads.rule_epsilon)
            mix = one
        else:
            base, scale, mix = one, one / count, zero
        v_square = zero
        for s in range(n):
            space.shares[waiting, s] = zero
        for s in range(low, high + 1):
            share = scale * (mix * space.weighted[s] + base * space.plain[s])
            space.shares[waiting, s] = share
            v_square += scale * (mix * heads.worth[node.row + s] + base) * share
        space.v_square[waiting] = v_square
        # The prototype's key: their mean, rotated to the middle, with a log multiplicity.
        log_m = zero
        if heads.multiplicity:
            coherence = (_norm(space.key) / count) / (norm_sum / count + heads.rule_epsilon)
            log_m = np.float32(math.log(min(max(count * coherence * coherence, one), count)))
        space.log_m[waiting] = log_m
        both = 2 * (node.first + heads.region_start) + low + high
        middle = both // 2
        middle += (both % 2) * (middle % 2)
        for i in range(half):
            x, y = space.key[i] / count, space.key[i + half] / count
            space.keys[waiting, i] = x * heads.cos[middle, i] - y * heads.sin[middle, i]
            space.keys[waiting, i + half] = (
                y * heads.cos[middle, i + half] + x * heads.sin[middle, i + half]
            )
        for i in range(2 * half, dim):
            space.keys[waiting, i] = space.key[i] / count
        space.spans[waiting, 0], space.spans[waiting, 1] = low, high
        space.spans[waiting, 2], space.spans[waiting, 3] = 1 if backwards else 0, t
        waiting += 1
        if waiting == WAITING:
            settle(node, heads, space, found, waiting)
            waiting = 0
    return waiting


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def settle(node: Any, heads: Any, space: Any, found: Any, waiting: int) -> None:
    """Find D of the intervals that wait."""
    width, padded, dim = space.p.shape[0], space.p.shape[1], heads.values.shape[1]
    probes, u = heads.exponentials.shape[1], node.head
    zero, two = np.float32(0.0), np.float32(2.0)
    multiply(
        space.keys.ctypes.data, dim, waiting, heads.readers.ctypes.data + 4 * u * dim * padded,
        padded, space.logits.ctypes.data, padded, 0, dim, padded,
    )  # fmt: skip
    for r in range(0, waiting, 4):
        rows = min(4, waiting - r)
        low, high = space.spans[r, 0], space.spans[r, 1]
        for s in range(r + 1, r + rows):
            low, high = min(low, space.spans[s, 0]), max(high, space.spans[s, 1])
        multiply(
            space.shares.ctypes.data + 4 * r * width, width, rows, space.p.ctypes.data, padded,
            space.mixed.ctypes.data + 4 * r * padded, padded, low, high + 1, padded,
        )  # fmt: skip
    power = space.bits.view(np.float32)
    for r in range(waiting):
        for q in range(padded):
            logit = space.logits[r, q] + (space.log_m[r] - heads.top[u, q])
            space.logits[r, q] = min(logit, _MAX_EXPONENT)
        exponential(space.logits[r], space.bits[r], power[r])
        v_square = space.v_square[r]
        for q in range(padded):
            x, y, square = space.zs[r, q], space.logits[r, q], space.squares[r, q]
            m_error = square + y * (y * v_square - two * space.mixed[r, q])
            m_error = heads.lambda_m * max(m_error, zero) / (max(square, zero) + heads.epsilon)
            z_error = heads.lambda_z * (x - y) * (x - y) / (x * x + heads.epsilon)
            space.logits[r, q] = x * (m_error + z_error)
        last = node.first + space.spans[r, 1]
        # Only probes that see all of the interval are asked, and no padding ever is.
        seen = _dot(space.logits, r, heads.inverse_total, u, heads.before[last], probes)
        found[space.spans[r, 2], space.spans[r, 3]] = seen / heads.seeing[last]
