"""The logits of probes and prototypes; a part of `triton_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mean_key(
    keys,  # [n, D], plain keys of the node
    feature,  # [BLOCK_F]
    used,
    at,  # tokens read before this block
    t,  # [BLOCK_T]
    inside,
    count,
    backward,
    n,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """[BLOCK_T, BLOCK_F]: some features of the mean key of the tokens up to each of a block.

    Earlier blocks are summed again for each block: keeping the sums of all features would take too
    many registers, and these loads are few compared with the Gram matrix's.
    """
    total = tl.zeros([BLOCK_F], tl.float32)
    for past in range(0, at, BLOCK_T):
        k = past + tl.arange(0, BLOCK_T)
        k = tl.where(backward, n - 1 - k, k)
        earlier = tl.load(keys + k[:, None] * D + feature[None, :], mask=used[None, :], other=0.0)
        total += tl.sum(earlier, 0)
    own = tl.load(
        keys + t[:, None] * D + feature[None, :], mask=inside[:, None] & used[None, :], other=0.0
    )
    return (total[None, :] + tl.cumsum(own, 0)) / count[:, None]


@triton.jit
def prototype_logits(
    keys,  # [n, D], plain keys of the node
    queries,  # [P, D], of its head
    probe,  # [BLOCK_P]
    is_probe,
    at,
    t,  # [BLOCK_T]
    inside,
    count,
    middle,
    backward,
    n,
    cos,  # [T, 2*HALF]
    sin,
    features,  # D
    half_features,  # HALF
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """q.k~ [BLOCK_T, BLOCK_P] without multiplicity, and |mean key|^2 [BLOCK_T]."""
    logits = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    step = tl.arange(0, BLOCK_F)
    # A rotation mixes features that are half its width apart: two blocks, feature by feature.
    for i in range(0, half_features, BLOCK_F):
        feature = i + step
        used = feature < HALF
        x = _mean_key(
            keys, feature, used, at, t, inside, count, backward, n, D, BLOCK_T, BLOCK_F
        )  # fmt: skip
        y = _mean_key(
            keys + HALF, feature, used, at, t, inside, count, backward, n, D, BLOCK_T, BLOCK_F
        )
        square += tl.sum(x * x + y * y, 1)
        turn = middle[:, None] * (2 * HALF) + feature[None, :]
        here = inside[:, None] & used[None, :]
        c = tl.load(cos + turn, mask=here, other=0.0)
        s = tl.load(sin + turn, mask=here, other=0.0)
        q = queries + probe[None, :] * D + feature[:, None]
        mask = is_probe[None, :] & used[:, None]
        low = tl.load(q, mask=mask, other=0.0)
        high = tl.load(q + HALF, mask=mask, other=0.0)
        logits = tl.dot(x * c - y * s, low, logits, input_precision="ieee")
        logits = tl.dot(y * c + x * s, high, logits, input_precision="ieee")
    if D > 2 * HALF:
        for i in range(2 * half_features, features, BLOCK_F):
            feature = i + step
            used = feature < D
            x = _mean_key(
                keys, feature, used, at, t, inside, count, backward, n, D, BLOCK_T, BLOCK_F
            )  # fmt: skip
            square += tl.sum(x * x, 1)
            q = tl.load(
                queries + probe[None, :] * D + feature[:, None],
                mask=is_probe[None, :] & used[:, None],
                other=0.0,
            )
            logits = tl.dot(x, q, logits, input_precision="ieee")
    return logits, square
