"""D of prefixes and suffixes of one node at a time, compiled for CPUs.

The equations are those of `gracekv.tree.engines.torch`. There each is a pass over memory; here a
node's data stay in the cache. A node is read forwards for its prefixes and backwards for its
suffixes. Intervals are collected, and products with all probes are computed for many of them at
once. An interval's D depends bitwise only on its node, not on which other intervals are computed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gracekv.kernels.intrinsics import inner
from gracekv.kernels.matmul import COLUMNS, multiply
from gracekv.kernels.numba_softmax import exponentiate
from gracekv.tree.engines.numba_arrays import MAX_PENDING

# As `gracekv.tree.engines.base.MAX_EXPONENT`.
_MAX_EXPONENT = np.float32(20.0)


@inner(fastmath={"reassoc", "contract"})
def _dot(a: Any, a_row: int, b: Any, b_row: int, first: int, stop: int) -> Any:
    """sum over first <= i < stop of a[a_row, i] b[b_row, i]; slices would be slower."""
    total = np.float32(0.0)
    for i in range(first, stop):
        total += a[a_row, i] * b[b_row, i]
    return total


@inner(fastmath={"reassoc", "contract"})
def _norm(a: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * a[i]
    return math.sqrt(total)


@inner(fastmath={"reassoc", "contract"})
def _weighted_sum(x: Any, row: int, scores: Any, width: int, factor: Any, base: Any) -> Any:
    """sum over i < width of (factor scores_i + base) x[row, i]."""
    total = np.float32(0.0)
    for i in range(width):
        total += (factor * scores[i] + base) * x[row, i]
    return total


@inner(fastmath={"reassoc", "contract"})
def _visible_sum(errors: Any, row: int, inverse_sum: Any, u: int, first: int, stop: int) -> Any:
    """sum over first <= q < stop of errors[row, q] / Z_q; other columns are ignored."""
    total, zero = np.float32(0.0), np.float32(0.0)
    for q in range(errors.shape[1]):
        total += (errors[row, q] if first <= q < stop else zero) * inverse_sum[u, q]
    return total


@inner(fastmath={"contract"})
def _rotate(key: Any, factor: Any, cos: Any, sin: Any, position: int, out: Any, row: int) -> None:
    """out[row] <- `factor` times key [d], rotated to `position`."""
    half = cos.shape[1] // 2
    for j in range(half):
        x, y = key[j] * factor, key[j + half] * factor
        out[row, j] = x * cos[position, j] - y * sin[position, j]
        out[row, j + half] = y * cos[position, j + half] + x * sin[position, j + half]
    for j in range(2 * half, len(key)):
        out[row, j] = key[j] * factor


@inner()
def token_masses(node: Any, heads: Any, mass: Any) -> Any:
    """Fill mass [n]: mean normalised probe mass of each token; returns their sum."""
    exponentials, inverse_sum, probe_mass = heads.exponentials, heads.inverse_sum, heads.mass
    last, row = node.first + node.length - 1, node.row
    first_probe, visible = heads.first_probe[last], heads.visible_probes[last]
    total = np.float32(0.0)
    # Probes inside a node do not see its later tokens.
    holds_probe = heads.first_probe[node.first] != first_probe
    for t in range(node.length):
        token_mass = probe_mass[row + t]
        if holds_probe:
            probes = exponentials.shape[1]
            token_mass = _dot(exponentials, row + t, inverse_sum, node.head, first_probe, probes)
        mass[t] = token_mass / visible
        total += mass[t]
    return total


@inner()
def load_node(node: Any, heads: Any, scratch: Any) -> None:
    """Copy data of the node that is read repeatedly, and compute the Gram matrix of its values."""
    exponentials, values, values_t = heads.exponentials, heads.values, scratch.values_t
    all_scores, scores, p = heads.scores, scratch.scores, scratch.p
    n, row, dim, stride = node.length, node.row, values.shape[1], scratch.gram.shape[1]
    for t in range(n):
        for q in range(exponentials.shape[1]):
            p[t, q] = exponentials[row + t, q]
        for i in range(dim):
            values_t[i, t] = values[row + t, i]
        scores[t] = all_scores[row + t]
    # Columns beyond the node have data of other nodes; their products are never read.
    multiply(
        values.ctypes.data + 4 * row * dim, dim, n, values_t.ctypes.data, stride,
        scratch.gram.ctypes.data, stride, 0, dim, (n + COLUMNS - 1) // COLUMNS * COLUMNS,
    )  # fmt: skip


@inner(fastmath={"contract"})
def add_intervals(node: Any, heads: Any, scratch: Any, backwards: bool, pending: int) -> int:
    """Collect prefixes (or suffixes) of a loaded node; returns how many intervals are pending.

    Their D is in `scratch.costs` after this or `flush`.

    Args:
        node, heads: `load_node` was called with them.
        scratch: likewise; `wanted` says whether to compute D of the tokens up to and including k
            (from k on).
        backwards: collect suffixes.
        pending: how many intervals are already pending in `scratch`.
    """
    # Local names, because each read of a tuple's field counts references.
    p, gram, cross, cross_terms = scratch.p, scratch.gram, scratch.cross, scratch.cross_terms
    z, m_square, key_sum = scratch.z, scratch.m_square, scratch.key_sum
    gram_sum, weighted_gram_sum = scratch.gram_sum, scratch.weighted_gram_sum
    pending_z, pending_m_square = scratch.pending_z, scratch.pending_m_square
    v_products, mean_keys, scores = scratch.v_products, scratch.mean_keys, scratch.scores
    spans, log_ms, v_squares = scratch.spans, scratch.log_m, scratch.v_square
    wanted = scratch.wanted
    key_norms, unrotated_keys = heads.key_norms, heads.unrotated_keys
    cos, sin = heads.cos, heads.sin
    n, row, stride, padded_probes = node.length, node.row, gram.shape[1], p.shape[1]
    width = (n + COLUMNS - 1) // COLUMNS * COLUMNS
    dim = unrotated_keys.shape[1]
    one, two, zero = np.float32(1.0), np.float32(2.0), np.float32(0.0)
    stop = 0
    for j in range(1, n):
        if wanted[n - 1 - j if backwards else j]:
            stop = j + 1
    if stop == 0:
        return pending
    z[:] = zero
    m_square[:] = zero
    key_sum[:] = zero
    gram_sum[:width] = zero
    weighted_gram_sum[:width] = zero
    norm_sum, score_sum = zero, zero
    for j in range(stop):
        t = n - 1 - j if backwards else j
        if j % 4 == 0:
            # Cross terms of |M|^2 of this token and the next three with the tokens before them.
            rows = min(4, stop - j)
            low, high = (n - j - rows + 1, n) if backwards else (0, j + rows - 1)
            for r in range(rows):
                token = t - r if backwards else t + r
                for i in range(width):
                    earlier = i > token if backwards else i < token
                    cross[r, i] = gram[token, i] if earlier else zero
            multiply(
                cross.ctypes.data, stride, rows, p.ctypes.data, padded_probes,
                cross_terms.ctypes.data, padded_probes, low, high, padded_probes,
            )  # fmt: skip
        count = np.float32(j + 1)
        diagonal, score = gram[t, t], scores[t]
        norm_sum += key_norms[row + t]
        score_sum += score
        for i in range(dim):
            key_sum[i] += unrotated_keys[row + t, i]
        for i in range(width):
            gram_sum[i] += gram[t, i]
            weighted_gram_sum[i] += score * gram[t, i]
        r = j % 4
        for i in range(padded_probes):
            x = p[t, i]
            z[i] += x
            m_square[i] += x * (two * cross_terms[r, i] + x * diagonal)
        if j == 0 or not wanted[t]:
            continue

        low, high = (t, n - 1) if backwards else (0, t)
        for i in range(padded_probes):
            pending_z[pending, i] = z[i]
            pending_m_square[pending, i] = m_square[i]
        # v~ = sum_t w_t v_t with normalised weights w_t = scale (factor R_t + base).
        if score_sum > zero:
            base = heads.uniform_base * score_sum / count
            scale = one / (score_sum + base * count + heads.rule_epsilon)
            factor = one
        else:
            base, scale, factor = one, one / count, zero
        for i in range(width):
            product = scale * (factor * weighted_gram_sum[i] + base * gram_sum[i])
            v_products[pending, i] = product if low <= i <= high else zero
        v_squares[pending] = scale * _weighted_sum(v_products, pending, scores, width, factor, base)
        # The prototype's key: the tokens' mean, rotated to the mean position, and log m.
        log_m = zero
        if heads.multiplicity:
            coherence = (_norm(key_sum) / count) / (norm_sum / count + heads.rule_epsilon)
            log_m = np.float32(math.log(min(max(count * coherence * coherence, one), count)))
        log_ms[pending] = log_m
        both_ends = 2 * (node.first + heads.region_start) + low + high
        position = both_ends // 2
        position += (both_ends % 2) * (position % 2)
        _rotate(key_sum, one / count, cos, sin, position, mean_keys, pending)
        spans[pending, 0], spans[pending, 1] = low, high
        spans[pending, 2], spans[pending, 3] = 1 if backwards else 0, t
        pending += 1
        if pending == MAX_PENDING:
            flush(node, heads, scratch, pending)
            pending = 0
    return pending


@inner(fastmath={"contract"})
def flush(node: Any, heads: Any, scratch: Any, pending: int) -> None:
    """Compute D of the pending intervals."""
    p, logits, m_dot_v, costs = scratch.p, scratch.logits, scratch.m_dot_v, scratch.costs
    pending_z, pending_m_square = scratch.pending_z, scratch.pending_m_square
    v_products, mean_keys = scratch.v_products, scratch.mean_keys
    spans, log_ms, v_squares = scratch.spans, scratch.log_m, scratch.v_square
    max_logit, inverse_sum, queries = heads.max_logit, heads.inverse_sum, heads.queries
    first_probe, visible_probes = heads.first_probe, heads.visible_probes
    lambda_z, lambda_m, epsilon = heads.lambda_z, heads.lambda_m, heads.epsilon
    stride, padded_probes, dim = v_products.shape[1], p.shape[1], mean_keys.shape[1]
    probes, u, first = heads.exponentials.shape[1], node.head, node.first
    zero, two = np.float32(0.0), np.float32(2.0)
    multiply(
        mean_keys.ctypes.data, dim, pending, queries.ctypes.data + 4 * u * dim * padded_probes,
        padded_probes, logits.ctypes.data, padded_probes, 0, dim, padded_probes,
    )  # fmt: skip
    for r in range(0, pending, 4):
        rows = min(4, pending - r)
        low, high = spans[r, 0], spans[r, 1]
        for s in range(r + 1, r + rows):
            low, high = min(low, spans[s, 0]), max(high, spans[s, 1])
        multiply(
            v_products.ctypes.data + 4 * r * stride, stride, rows, p.ctypes.data, padded_probes,
            m_dot_v.ctypes.data + 4 * r * padded_probes, padded_probes, low, high + 1,
            padded_probes,
        )  # fmt: skip
    for r in range(pending):
        log_m = log_ms[r]
        for i in range(padded_probes):
            logits[r, i] = min(logits[r, i] + (log_m - max_logit[u, i]), _MAX_EXPONENT)
    size = pending * padded_probes
    exponentiate(logits.reshape(-1)[:size])
    for r in range(pending):
        v_square = v_squares[r]
        for q in range(padded_probes):
            x, y, x_square = pending_z[r, q], logits[r, q], pending_m_square[r, q]
            m_error = x_square + y * (y * v_square - two * m_dot_v[r, q])
            m_error = lambda_m * max(m_error, zero) / (max(x_square, zero) + epsilon)
            z_error = lambda_z * (x - y) * (x - y) / (x * x + epsilon)
            logits[r, q] = x * (m_error + z_error)
        last = first + spans[r, 1]
        # Only probes that see the whole interval count; padding does not.
        total = _visible_sum(logits, r, inverse_sum, u, first_probe[last], probes)
        costs[spans[r, 2], spans[r, 3]] = total / visible_probes[last]
