"""D of node ends in one fused kernel, for NVIDIA GPUs: nothing between inputs and answer is stored.

The equations are those of `gracekv.tree.prototype`. One program reads one node in one direction,
for one block of probes; tokens come in blocks, in the order in which they are read. A block meets
itself and every block before it, as in causal attention: the Gram matrix of their values, times
their exponentials, gives both products with M. All else that a block needs of the tokens before it
are sums of theirs, so a node may be of any length, and a program's memory does not depend on it.

Products are plain float32 ones: tf32 would change which cuts are best.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gracekv.kernels.logits_triton import prototype_logits

# As in `gracekv.tree.prototype`.
_MAX_EXPONENT = tl.constexpr(20.0)


@triton.jit
def _gram(
    values,  # [n, D], of the node
    t,  # [BLOCK_T]
    inside,
    other,  # [BLOCK_C]
    known,
    features,  # D
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """[BLOCK_T, BLOCK_C]: products of the values of two blocks of tokens."""
    gram = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for i in range(0, features, BLOCK_F):
        feature = i + tl.arange(0, BLOCK_F)
        used = feature < D
        x = tl.load(
            values + t[:, None] * D + feature[None, :],
            mask=inside[:, None] & used[None, :],
            other=0.0,
        )
        y = tl.load(
            values + other[None, :] * D + feature[:, None],
            mask=known[None, :] & used[:, None],
            other=0.0,
        )
        gram = tl.dot(x, y, gram, input_precision="ieee")
    return gram


@triton.jit(do_not_specialize=["tokens", "nodes", "width", "region_start", "features", "halves"])
def node_ends(
    head,  # [V]
    first,  # [V], place of the node's first token in the region
    length,  # [V]
    exponentials,  # [U*N, P]
    plain_keys,  # [U*N, D]
    key_norms,  # [U*N]
    values,  # [U*N, D]
    worth,  # [U*N]
    queries,  # [U, P, D]
    top,  # [U, P]
    inverse_total,  # [U, P]
    seeing,  # [N]
    before,  # [N+1]
    cos,  # [T, 2*HALF], both halves alike
    sin,
    sides,  # [parts, 2, V, width]
    mass,  # [parts, V, width]
    drop,  # [parts, V]
    tokens,  # N
    nodes,  # V
    width,
    region_start,
    lambda_z,
    lambda_m,
    epsilon,
    uniform_base,
    rule_epsilon,
    features,  # D, and HALF below, to loop over: unrolled, these loops need too many registers
    halves,
    P: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    MULTIPLICITY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program (node, direction, part of the probes): its share of `IntervalCosts`."""
    v = tl.program_id(0).to(tl.int64)
    backward = tl.program_id(1) == 1
    part = tl.program_id(2)
    n = tl.load(length + v).to(tl.int32)
    u = tl.load(head + v)
    start = tl.load(first + v)
    # From here on a token is known by its place in the node, t, and a probe by its place in P.
    row = u * tokens + start
    exponentials += row * P
    plain_keys += row * D
    key_norms += row
    values += row * D
    worth += row
    queries += u * P * D
    seeing += start
    before += start
    sides += ((part * 2 + tl.program_id(1)) * nodes.to(tl.int64) + v) * width
    mass += (part * nodes.to(tl.int64) + v) * width
    origin = (start + region_start).to(tl.int32)
    dim = tl.arange(0, BLOCK_D)
    probe = part * BLOCK_P + tl.arange(0, BLOCK_P)
    asked = probe < P
    peak = tl.load(top + u * P + probe, mask=asked, other=0.0)
    inverse = tl.load(inverse_total + u * P + probe, mask=asked, other=0.0)

    plain_sum = tl.zeros([BLOCK_D], tl.float32)
    weighted_sum = tl.zeros([BLOCK_D], tl.float32)
    z_sum = tl.zeros([BLOCK_P], tl.float32)
    m_sum = tl.zeros([BLOCK_P], tl.float32)
    norm_sum = 0.0
    worth_sum = 0.0
    dropped = 0.0
    for at in range(0, n, BLOCK_T):
        j = at + tl.arange(0, BLOCK_T)
        inside = j < n
        t = tl.where(backward, n - 1 - j, j)
        count = (j + 1).to(tl.float32)

        # Twice the middle is the sum of both ends; a half goes to the even side.
        both = 2 * origin + tl.where(backward, n - 1 + t, j)
        middle = both // 2
        middle += (both % 2) * (middle % 2)
        logits, square = prototype_logits(
            plain_keys, queries, probe, asked, at, t, inside, count, middle, backward, n, cos, sin,
            features, halves, D, HALF, BLOCK_T, BLOCK_P, BLOCK_F,
        )  # fmt: skip
        logits -= peak[None, :]
        if MULTIPLICITY:
            norms = tl.load(key_norms + t, mask=inside, other=0.0)
            norm_mean = (norm_sum + tl.cumsum(norms, 0)) / count
            norm_sum += tl.sum(norms, 0)
            coherence = tl.sqrt(square) / (norm_mean + rule_epsilon)
            effective = tl.minimum(tl.maximum(count * coherence * coherence, 1.0), count)
            logits += tl.log(effective)[:, None]
        z_tilde = tl.exp(tl.minimum(logits, _MAX_EXPONENT))

        # v~ = sum_s (by_worth R_s + evenly) v_s; without any worth all count alike.
        w = tl.load(worth + t, mask=inside, other=0.0)
        total = worth_sum + tl.cumsum(w, 0)
        worth_sum += tl.sum(w, 0)
        worthy = total > 0
        base = uniform_base * total / count
        by_worth = tl.where(worthy, 1.0 / (total + base * count + rule_epsilon), 0.0)
        evenly = tl.where(worthy, base * by_worth, 1.0 / count)

        v_square = tl.zeros([BLOCK_T], tl.float32)
        m_dot_v = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        m_square = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        for past in range(0, at + BLOCK_T, BLOCK_C):
            k = past + tl.arange(0, BLOCK_C)
            known = k < n
            s = tl.where(backward, n - 1 - k, k)
            gram = _gram(values, t, inside, s, known, features, D, BLOCK_T, BLOCK_C, BLOCK_F)
            # v~.v_s: what the blocks before this one give to v~, then this block's own tokens.
            value = tl.load(
                values + s[:, None] * D + dim[None, :],
                mask=known[:, None] & (dim < D)[None, :],
                other=0.0,
            )
            share = by_worth[:, None] * (
                tl.sum(value * weighted_sum[None, :], 1)[None, :]
                + tl.cumsum(gram * w[:, None], 0)
            )  # fmt: skip
            share += evenly[:, None] * (
                tl.sum(value * plain_sum[None, :], 1)[None, :] + tl.cumsum(gram, 0)
            )
            share = tl.where(k[None, :] <= j[:, None], share, 0.0)
            w_s = tl.load(worth + s, mask=known, other=0.0)
            v_square += tl.sum(share * (by_worth[:, None] * w_s[None, :] + evenly[:, None]), 1)
            p = tl.load(
                exponentials + s[:, None] * P + probe[None, :],
                mask=known[:, None] & asked[None, :],
                other=0.0,
            )
            m_dot_v = tl.dot(share, p, m_dot_v, input_precision="ieee")
            # Token j adds 2 p_j v_j.M + p_j^2 |v_j|^2 to |M|^2, with the M of the tokens before it.
            twice = tl.where(k[None, :] < j[:, None], 2.0 * gram, 0.0)
            twice = tl.where(k[None, :] == j[:, None], gram, twice)
            m_square = tl.dot(twice, p, m_square, input_precision="ieee")
        value = tl.load(
            values + t[:, None] * D + dim[None, :],
            mask=inside[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        plain_sum += tl.sum(value, 0)
        weighted_sum += tl.sum(value * w[:, None], 0)

        p = tl.load(
            exponentials + t[:, None] * P + probe[None, :],
            mask=inside[:, None] & asked[None, :],
            other=0.0,
        )
        z = z_sum[None, :] + tl.cumsum(p, 0)
        z_sum += tl.sum(p, 0)
        m_square *= p
        m_new = tl.sum(m_square, 0)
        m_square = m_sum[None, :] + tl.cumsum(m_square, 0)
        m_sum += m_new
        error = m_square + z_tilde * (z_tilde * v_square[:, None] - 2.0 * m_dot_v)
        error = lambda_m * tl.maximum(error, 0.0) / (tl.maximum(m_square, 0.0) + epsilon)
        error += lambda_z * (z - z_tilde) * (z - z_tilde) / (z * z + epsilon)
        # Probes inside the node do not see its later tokens.
        last = tl.where(backward, n - 1, t)
        unseen = tl.load(before + last, mask=inside, other=0)
        sees = asked[None, :] & (probe[None, :] >= unseen[:, None])
        found = tl.sum(tl.where(sees, z * error * inverse[None, :], 0.0), 1)
        found /= tl.load(seeing + last, mask=inside, other=1.0)
        tl.store(sides + t, tl.where(j == 0, 0.0, found), mask=inside)
        if not backward:
            visible = tl.where(probe >= tl.load(before + n - 1), inverse, 0.0)
            masses = tl.sum(p * visible[None, :], 1) / tl.load(seeing + n - 1)
            tl.store(mass + t, masses, mask=inside)
            dropped += tl.sum(masses, 0)
    if not backward:
        tl.store(drop + part * nodes.to(tl.int64) + v, dropped)
