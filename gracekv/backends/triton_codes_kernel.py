"""The kernel that attends to splits of quantised entries, which it dequantises in registers.

It reads only codes, scales and zero points from memory. Its partial results are next to those of
`triton_split_kernel`, for `triton_merge_kernel`. Keys and values are rounded to the dtype of the
queries before the matrix products, like unquantised numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gracekv.backends.triton_merge_kernel import add_entries, capped, mask_of, normalised


@triton.jit
def _numbers(
    codes,  # of the split's first entry
    scale,  # of its first block, or of the entry itself
    zero,
    n,  # [BLOCK_N] entries of the split
    dim,  # [BLOCK_D]
    used,  # see mask_of
    within,  # place of the first entry in its block
    D: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_D]: zero + scale * code; see `Codes`."""
    if BITS == 8:
        code = tl.load(codes + n[:, None] * D + dim[None, :], mask=used, other=0).to(tl.int32)
    else:
        row: tl.constexpr = D * BITS // 8
        at = n[:, None] * row + (dim % row)[None, :]
        byte = tl.load(codes + at, mask=used, other=0).to(tl.int32)
        code = (byte >> (dim // row * BITS)[None, :]) & ((1 << BITS) - 1)
    if KEYS:
        at = ((within + n) // SIZE)[:, None] * D + dim[None, :]
    elif SIZE < D:
        at = n[:, None] * (D // SIZE) + (dim // SIZE)[None, :]
    else:
        at = n[:, None] + (dim * 0)[None, :]
    s = tl.load(scale + at, mask=used, other=0.0).to(tl.float32)
    return tl.load(zero + at, mask=used, other=0.0).to(tl.float32) + s * code.to(tl.float32)


@triton.jit(do_not_specialize=["width", "per_sequence"])
def attend_coded_splits(
    query,  # [B, H, Tq, D]
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_codes,  # [E, D * BITS / 8]
    key_scale,  # [N, D]
    key_zero,
    value_codes,
    value_scale,  # [E, D / SIZE]
    value_zero,
    bias,  # [E]
    items,  # see PartSplits
    item_first,
    rows,  # [B], or None
    part_output,  # [B, width, n * Tq, D] float32
    part_lse,  # [B, width, n * Tq]
    scale,
    softcap,  # used if CAPPED
    group,  # n
    tokens,  # Tq
    width,
    per_sequence,  # batch rows of a sequence, if `rows` is None
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (batch row and query tile, split): output and log-sum-exp into the split's slot."""
    count = group * tokens
    tiles = tl.cdiv(count, BLOCK_M)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    sequence = batch // per_sequence if rows is None else tl.load(rows + batch)
    item = tl.load(item_first + sequence) + tl.program_id(1)
    if item < tl.load(item_first + sequence + 1):
        head = tl.load(items + item * 5)
        entry = tl.load(items + item * 5 + 1)
        length = tl.load(items + item * 5 + 2).to(tl.int32)
        slot = tl.load(items + item * 5 + 3)
        place = tl.load(items + item * 5 + 4)
        m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        step = tl.arange(0, BLOCK_N)
        real = m < count
        used = mask_of(real, D, BLOCK_D)
        at = (
            query
            + batch * query_batch_stride
            + (head * group + m // tokens)[:, None] * query_head_stride
            + (m % tokens)[:, None] * query_token_stride
            + dim[None, :]
        )
        q = tl.load(at, mask=used, other=0.0)
        within = (place % SIZE).to(tl.int32)
        # Where the codes and scales of the split begin, whose first entry is `entry`.
        key_codes += entry * (D * BITS // 8)
        key_scale += place // SIZE * D
        key_zero += place // SIZE * D
        value_codes += entry * (D * BITS // 8)
        value_scale += entry * (D // SIZE) if SIZE < D else entry
        value_zero += entry * (D // SIZE) if SIZE < D else entry
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, length, BLOCK_N):
            n = start + step
            inside = n < length
            here = mask_of(inside, D, BLOCK_D)
            k = _numbers(
                key_codes, key_scale, key_zero, n, dim, here, within, D, BITS, SIZE, True
            ).to(q.dtype)
            v = _numbers(
                value_codes, value_scale, value_zero, n, dim, here, within, D, BITS, SIZE, False
            ).to(q.dtype)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if CAPPED:
                logits = capped(logits, softcap)
            logits += tl.load(bias + entry + n, mask=inside, other=0.0)[None, :]
            logits = tl.where(inside[None, :], logits, float("-inf"))
            top, total, acc = add_entries(logits, v, top, total, acc, PRECISION)
        output, lse = normalised(top, total, acc)
        out = part_output + ((batch * width + slot) * count + m)[:, None] * D + dim[None, :]
        tl.store(out, output, mask=used)
        tl.store(part_lse + (batch * width + slot) * count + m, lse, mask=real)
