"""D of prefixes and suffixes of nodes in one kernel for NVIDIA GPUs.

One program reads one node in one direction for one block of probes, token by token, and follows the
equations of `gracekv.tree.prototype` directly: its running sums stay in registers, so a node may
have any length. Sums are in float32 and always in the same order. A program is one warp, so it
never waits for others.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As `gracekv.tree.engines.base.MAX_EXPONENT`.
_MAX_EXPONENT = tl.constexpr(20.0)


# A level's nodes are rows of one tensor, aligned or not, which would compile two kernels.
@triton.jit(
    do_not_specialize=["tokens", "nodes", "width", "slots", "region_start"],
    do_not_specialize_on_alignment=["tree", "begin", "length"],
)
def interval_costs(
    tree,  # [V]
    begin,  # [V], relative to the slot
    length,  # [V]
    slot_start,  # [U*J]
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
    sums,  # [parts, 3V*width + V]: costs [2, V, width], mass [V, width] and drop [V]
    tokens,  # N
    nodes,  # V
    width,
    slots,  # J
    region_start,
    lambda_z,
    lambda_m,
    epsilon,
    uniform_base,
    rule_epsilon,
    P: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    MULTIPLICITY: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program (node, direction, part of the probes): its part of `IntervalCosts`."""
    v = tl.program_id(0).to(tl.int64)
    backward = tl.program_id(1) == 1
    part = tl.program_id(2)
    n = tl.load(length + v).to(tl.int32)
    b = tl.load(tree + v)
    u = b // slots
    start = tl.load(slot_start + b) - region_start + tl.load(begin + v)
    sums += part * nodes.to(tl.int64) * (3 * width + 1)
    costs = sums + (tl.program_id(1) * nodes.to(tl.int64) + v) * width
    mass = sums + (2 * nodes.to(tl.int64) + v) * width
    # Features in LANES columns: each thread holds whole columns, so that most sums stay in it.
    row_of, lane = tl.arange(0, BLOCK_D // LANES)[:, None], tl.arange(0, LANES)[None, :]
    dim = row_of * LANES + lane
    # A rotation mixes features that are half its width apart; the others are paired as they come.
    pair = tl.arange(0, BLOCK_D // LANES // 2)[:, None] * LANES + lane
    rotates = pair < HALF
    one = tl.where(rotates, pair, 2 * pair)
    other = tl.where(rotates, pair + HALF, 2 * pair + 1)
    is_dim, is_one, is_other = dim < D, one < D, other < D
    probe = part * BLOCK_P + tl.arange(0, BLOCK_P)
    is_probe = probe < P
    largest = tl.load(max_logit + u * P + probe, mask=is_probe, other=0.0)
    inverse = tl.load(inverse_sum + u * P + probe, mask=is_probe, other=0.0)
    query = queries + (u * P + probe)[None, :, None] * D
    asked = is_probe[None, :, None]
    query_one = tl.load(query + one[:, None, :], mask=asked & is_one[:, None, :], other=0.0)
    query_other = tl.load(query + other[:, None, :], mask=asked & is_other[:, None, :], other=0.0)
    end = start + n - 1
    sees_node = tl.where(probe >= tl.load(first_probe + end), inverse, 0.0)
    see_node = tl.load(visible_probes + end)

    key_one = tl.zeros([BLOCK_D // LANES // 2, LANES], tl.float32)
    key_other = tl.zeros([BLOCK_D // LANES // 2, LANES], tl.float32)
    value_sum = tl.zeros([BLOCK_D // LANES, LANES], tl.float32)
    weighted_sum = tl.zeros([BLOCK_D // LANES, LANES], tl.float32)
    z = tl.zeros([BLOCK_P], tl.float32)
    m = tl.zeros([BLOCK_D // LANES, BLOCK_P, LANES], tl.float32)
    count = 0.0
    norm_sum = 0.0
    score_sum = 0.0
    drop_sum = 0.0
    for j in range(n):
        t = tl.where(backward, n - 1 - j, j)
        row = u * tokens + start + t
        count += 1.0
        key_one += tl.load(unrotated_keys + row * D + one, mask=is_one, other=0.0)
        key_other += tl.load(unrotated_keys + row * D + other, mask=is_other, other=0.0)
        value = tl.load(values + row * D + dim, mask=is_dim, other=0.0)
        score = tl.load(scores + row)
        p = tl.load(exponentials + row * P + probe, mask=is_probe, other=0.0)
        value_sum += value
        weighted_sum += score * value
        score_sum += score
        z += p
        m += p[:, None][None] * value[:, None, :]

        # The mean position, rounded half to even.
        both_ends = 2 * (start + region_start) + tl.where(backward, n - 1 + t, t)
        middle = both_ends // 2
        middle += (both_ends % 2) * (middle % 2)
        c = tl.load(cos + middle * (2 * HALF) + pair, mask=rotates, other=1.0)
        s = tl.load(sin + middle * (2 * HALF) + pair, mask=rotates, other=0.0)
        products = tl.sum(query_one * (key_one * c - key_other * s)[:, None, :], 0)
        products += tl.sum(query_other * (key_other * c + key_one * s)[:, None, :], 0)
        logit = tl.sum(products, 1) / count - largest
        if MULTIPLICITY:
            norm_sum += tl.load(key_norms + row)
            square = tl.sum(tl.sum(key_one * key_one + key_other * key_other, 0), 0)
            coherence = tl.sqrt(square) / count / (norm_sum / count + rule_epsilon)
            logit += tl.log(tl.minimum(tl.maximum(count * coherence * coherence, 1.0), count))
        z_tilde = tl.exp(tl.minimum(logit, _MAX_EXPONENT))

        # If all scores are 0, tokens have equal weights.
        base = uniform_base * score_sum / count
        total = score_sum + base * count + rule_epsilon
        weighted = (weighted_sum + base * value_sum) / total
        merged = tl.where(score_sum > 0, weighted, value_sum / count)
        missed = m - z_tilde[:, None][None] * merged[:, None, :]
        error = lambda_m * tl.sum(tl.sum(missed * missed, 0), 1)
        error /= tl.sum(tl.sum(m * m, 0), 1) + epsilon
        error += lambda_z * (z - z_tilde) * (z - z_tilde) / (z * z + epsilon)
        # Probes inside the node do not see its later tokens.
        last = start + tl.where(backward, n - 1, t)
        sees = probe >= tl.load(first_probe + last)
        cost = tl.sum(tl.where(sees, z * error * inverse, 0.0), 0) / tl.load(visible_probes + last)
        tl.store(costs + t, tl.where(j == 0, 0.0, cost))
        if not backward:
            own = tl.sum(p * sees_node, 0) / see_node
            tl.store(mass + t, own)
            drop_sum += own
    if not backward:
        tl.store(sums + 3 * nodes.to(tl.int64) * width + v, drop_sum)
