"""D of prefixes and suffixes of nodes in one kernel for NVIDIA GPUs, without stored intermediates.

The equations are those of `gracekv.tree.prototype`. One program reads one node in one direction,
for one block of probes; tokens come in blocks, in the order in which they are read. As in causal
attention, each block is combined with itself and every block before it: the Gram matrix of their
values, times their exponentials, gives both products with M. Everything else that a block needs of
the tokens before it are running sums, so a node may be of any length, and a program's memory does
not depend on it.

Products are in float32: tf32 would change which cuts are best.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gracekv.tree.engines.triton_logits import prototype_logits

# As `gracekv.tree.engines.base.MAX_EXPONENT`.
_MAX_EXPONENT = tl.constexpr(20.0)


@triton.jit
def _gram(
    values,  # [n, D], of the node
    t,  # [BLOCK_T]
    inside,
    other,  # [BLOCK_C]
    valid,
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
            mask=valid[None, :] & used[:, None],
            other=0.0,
        )
        gram = tl.dot(x, y, gram, input_precision="ieee")
    return gram


@triton.jit(
    do_not_specialize=["tokens", "nodes", "width", "region_start", "features", "half_features"]
)
def interval_costs(
    head,  # [V]
    first,  # [V], place of the node's first token in the region
    length,  # [V]
    exponentials,  # [U*N, P]
    unrotated_keys,  # [U*N, D]
    key_norms,  # [U*N]
    values,  # [U*N, D]
    scores,  # [U*N]
    queries,  # [U, P, D]
    max_logit,  # [U, P]
    inverse_sum,  # [U, P]
    visible_probes,  # [N]
    first_probe,  # [N+1]
    cos,  # [T, 2*HALF], both halves alike
    sin,
    costs,  # [parts, 2, V, width]
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
    features,  # D, and below HALF: bounds of loops that need too many registers if unrolled
    half_features,
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
    """Program (node, direction, part of the probes): its part of `IntervalCosts`."""
    v = tl.program_id(0).to(tl.int64)
    backward = tl.program_id(1) == 1
    part = tl.program_id(2)
    n = tl.load(length + v).to(tl.int32)
    u = tl.load(head + v)
    start = tl.load(first + v)
    # From here on t is a token's index in the node.
    row = u * tokens + start
    exponentials += row * P
    unrotated_keys += row * D
    key_norms += row
    values += row * D
    scores += row
    queries += u * P * D
    visible_probes += start
    first_probe += start
    costs += ((part * 2 + tl.program_id(1)) * nodes.to(tl.int64) + v) * width
    mass += (part * nodes.to(tl.int64) + v) * width
    origin = (start + region_start).to(tl.int32)
    dim = tl.arange(0, BLOCK_D)
    probe = part * BLOCK_P + tl.arange(0, BLOCK_P)
    is_probe = probe < P
    largest = tl.load(max_logit + u * P + probe, mask=is_probe, other=0.0)
    inverse = tl.load(inverse_sum + u * P + probe, mask=is_probe, other=0.0)

    value_sum = tl.zeros([BLOCK_D], tl.float32)
    weighted_sum = tl.zeros([BLOCK_D], tl.float32)
    z_sum = tl.zeros([BLOCK_P], tl.float32)
    m_sum = tl.zeros([BLOCK_P], tl.float32)
    norm_sum = 0.0
    score_sum = 0.0
    drop_sum = 0.0
    for at in range(0, n, BLOCK_T):
        j = at + tl.arange(0, BLOCK_T)
        inside = j < n
        t = tl.where(backward, n - 1 - j, j)
        count = (j + 1).to(tl.float32)

        # The mean position, rounded half to even.
        both_ends = 2 * origin + tl.where(backward, n - 1 + t, j)
        middle = both_ends // 2
        middle += (both_ends % 2) * (middle % 2)
        logits, square = prototype_logits(
            unrotated_keys, queries, probe, is_probe, at, t, inside, count, middle, backward, n,
            cos, sin, features, half_features, D, HALF, BLOCK_T, BLOCK_P, BLOCK_F,
        )  # fmt: skip
        logits -= largest[None, :]
        if MULTIPLICITY:
            norms = tl.load(key_norms + t, mask=inside, other=0.0)
            norm_mean = (norm_sum + tl.cumsum(norms, 0)) / count
            norm_sum += tl.sum(norms, 0)
            coherence = tl.sqrt(square) / (norm_mean + rule_epsilon)
            effective = tl.minimum(tl.maximum(count * coherence * coherence, 1.0), count)
            logits += tl.log(effective)[:, None]
        z_tilde = tl.exp(tl.minimum(logits, _MAX_EXPONENT))

        # v~ = sum_s (by_score R_s + evenly) v_s; if all scores are 0, tokens weigh the same.
        w = tl.load(scores + t, mask=inside, other=0.0)
        total = score_sum + tl.cumsum(w, 0)
        score_sum += tl.sum(w, 0)
        has_score = total > 0
        base = uniform_base * total / count
        by_score = tl.where(has_score, 1.0 / (total + base * count + rule_epsilon), 0.0)
        evenly = tl.where(has_score, base * by_score, 1.0 / count)

        v_square = tl.zeros([BLOCK_T], tl.float32)
        m_dot_v = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        m_square = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        for past in range(0, at + BLOCK_T, BLOCK_C):
            k = past + tl.arange(0, BLOCK_C)
            valid = k < n
            s = tl.where(backward, n - 1 - k, k)
            gram = _gram(values, t, inside, s, valid, features, D, BLOCK_T, BLOCK_C, BLOCK_F)
            # v~.v_s: the part of earlier blocks in v~, and that of this block's own tokens.
            value = tl.load(
                values + s[:, None] * D + dim[None, :],
                mask=valid[:, None] & (dim < D)[None, :],
                other=0.0,
            )
            product = by_score[:, None] * (
                tl.sum(value * weighted_sum[None, :], 1)[None, :]
                + tl.cumsum(gram * w[:, None], 0)
            )  # fmt: skip
            product += evenly[:, None] * (
                tl.sum(value * value_sum[None, :], 1)[None, :] + tl.cumsum(gram, 0)
            )
            product = tl.where(k[None, :] <= j[:, None], product, 0.0)
            w_s = tl.load(scores + s, mask=valid, other=0.0)
            v_square += tl.sum(product * (by_score[:, None] * w_s[None, :] + evenly[:, None]), 1)
            p = tl.load(
                exponentials + s[:, None] * P + probe[None, :],
                mask=valid[:, None] & is_probe[None, :],
                other=0.0,
            )
            m_dot_v = tl.dot(product, p, m_dot_v, input_precision="ieee")
            # Token j adds 2 p_j v_j.M + p_j^2 |v_j|^2 to |M|^2, M of the tokens before it.
            cross = tl.where(k[None, :] < j[:, None], 2.0 * gram, 0.0)
            cross = tl.where(k[None, :] == j[:, None], gram, cross)
            m_square = tl.dot(cross, p, m_square, input_precision="ieee")
        value = tl.load(
            values + t[:, None] * D + dim[None, :],
            mask=inside[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        value_sum += tl.sum(value, 0)
        weighted_sum += tl.sum(value * w[:, None], 0)

        p = tl.load(
            exponentials + t[:, None] * P + probe[None, :],
            mask=inside[:, None] & is_probe[None, :],
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
        first_seeing = tl.load(first_probe + last, mask=inside, other=0)
        sees = is_probe[None, :] & (probe[None, :] >= first_seeing[:, None])
        cost = tl.sum(tl.where(sees, z * error * inverse[None, :], 0.0), 1)
        cost /= tl.load(visible_probes + last, mask=inside, other=1.0)
        tl.store(costs + t, tl.where(j == 0, 0.0, cost), mask=inside)
        if not backward:
            visible = tl.where(probe >= tl.load(first_probe + n - 1), inverse, 0.0)
            masses = tl.sum(p * visible[None, :], 1) / tl.load(visible_probes + n - 1)
            tl.store(mass + t, masses, mask=inside)
            drop_sum += tl.sum(masses, 0)
    if not backward:
        tl.store(drop + part * nodes.to(tl.int64) + v, drop_sum)
