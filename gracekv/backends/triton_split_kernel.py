"""The kernel that attends to splits of the entries; `triton_merge_kernel` merges their results.

One program per batch row, query tile and split. A tile holds all query heads of one KV head and all
new tokens, so keys and values are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gracekv.backends.triton_merge_kernel import add_entries, capped, mask_of, normalised

# Whether query t sees entry e, and what is added to the logit.
PACKED = tl.constexpr(0)  # always; the log multiplicity is added
CAUSAL = tl.constexpr(1)  # e < length - Tq + t + 1
BOOLEAN = tl.constexpr(2)  # the mask is not 0
ADDITIVE = tl.constexpr(3)  # the mask is added


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    last,  # [BLOCK_M] last entry that each query row sees, if CAUSAL
    keys,
    values,
    key_stride,
    value_stride,
    extra,  # log multiplicity, or the mask of each query row [BLOCK_M]
    extra_stride,  # of the mask
    first,  # of the entries, as seen from `last`
    count,  # of the entries
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Normalised output [BLOCK_M, BLOCK_D] and log-sum-exp [BLOCK_M] over `count` entries."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_D)
    step = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + step
        inside = n < count
        # Storage past the end may hold anything, even NaN; it is never read.
        used = mask_of(inside, D, BLOCK_D)
        k = tl.load(keys + n[:, None] * key_stride + dim[None, :], mask=used, other=0.0)
        v = tl.load(values + n[:, None] * value_stride + dim[None, :], mask=used, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:
            logits = capped(logits, softcap)
        if KIND == PACKED:
            logits += tl.load(extra + n, mask=inside, other=0.0)[None, :]
            seen = inside[None, :]
        elif KIND == CAUSAL:
            seen = inside[None, :] & ((first + n)[None, :] <= last[:, None])
        else:
            at = extra[:, None] + n[None, :] * extra_stride
            if KIND == BOOLEAN:
                seen = tl.load(at, mask=inside[None, :], other=0) != 0
            else:
                logits += tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
                seen = inside[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        top, total, acc = add_entries(logits, v, top, total, acc, PRECISION)
    return normalised(top, total, acc)


@triton.jit(
    do_not_specialize=[
        "tail_size",
        "tail_chunk",
        "tail_splits",
        "slots",
        "packed_splits",
        "per_sequence",
    ]
)
def attend_splits(
    query,  # [B, H, Tq, D]
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    keys,  # [E, D]
    values,
    key_stride,
    value_stride,
    bias,  # [E]
    items,  # see PartSplits
    item_first,
    tail_keys,  # [B, G, S, D]
    tail_values,
    tail_key_batch_stride,
    tail_key_head_stride,
    tail_key_stride,
    tail_value_batch_stride,
    tail_value_head_stride,
    tail_value_stride,
    tail_length,  # [B], or None for all places
    mask,  # [B, 1, Tq, S], or unused
    mask_batch_stride,
    mask_token_stride,
    mask_key_stride,
    rows,  # [B], or None
    part_output,  # [B, slots + G * tail_splits, n * Tq, D] float32
    part_lse,  # [B, slots + G * tail_splits, n * Tq]
    scale,
    softcap,  # used if CAPPED
    heads,  # G
    group,  # n
    tokens,  # Tq
    tail_size,  # S
    tail_chunk,
    tail_splits,
    slots,
    packed_splits,  # the most items of a sequence
    per_sequence,  # batch rows of a sequence, if `rows` is None
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (batch row and query tile, split): output and log-sum-exp into the split's slot."""
    count = group * tokens
    tiles = tl.cdiv(count, BLOCK_M)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    token = m % tokens
    dim = tl.arange(0, BLOCK_D)
    real = m < count
    used = mask_of(real, D, BLOCK_D)
    # Addresses of this tile's queries, without the offset of the KV head.
    row = token.to(tl.int64) * query_token_stride + batch * query_batch_stride
    row += (m // tokens).to(tl.int64) * query_head_stride
    at = query + row[:, None] + dim[None, :]
    # Addresses of its results, without the offset of the slot.
    width = slots + heads * tail_splits
    out = part_output + (batch * width * count + m)[:, None] * D + dim[None, :]
    lse_out = part_lse + batch * width * count + m
    if split < packed_splits:
        sequence = batch // per_sequence if rows is None else tl.load(rows + batch)
        item = tl.load(item_first + sequence) + split
        if item < tl.load(item_first + sequence + 1):
            head = tl.load(items + item * 4)
            entry = tl.load(items + item * 4 + 1)
            length = tl.load(items + item * 4 + 2).to(tl.int32)
            slot = tl.load(items + item * 4 + 3)
            q = tl.load(at + head * group * query_head_stride, mask=used, other=0.0)
            output, lse = _attend(
                q,
                0,
                keys + entry * key_stride,
                values + entry * value_stride,
                key_stride,
                value_stride,
                bias + entry,
                0,
                0,
                length,
                scale,
                softcap,
                D,
                BLOCK_N,
                PACKED,
                CAPPED,
                PRECISION,
            )
            tl.store(out + slot * count * D, output, mask=used)
            tl.store(lse_out + slot * count, lse, mask=real)
    else:
        head = ((split - packed_splits) // tail_splits).to(tl.int64)
        first = ((split - packed_splits) % tail_splits) * tail_chunk
        length = tail_size if tail_length is None else tl.load(tail_length + batch).to(tl.int32)
        # The grid follows the buffer's size; splits past the used length are empty.
        here = tl.maximum(tl.minimum(length - first, tail_chunk), 0)
        q = tl.load(at + head * group * query_head_stride, mask=used, other=0.0)
        begin = first.to(tl.int64)
        k = tail_keys + batch * tail_key_batch_stride + head * tail_key_head_stride
        v = tail_values + batch * tail_value_batch_stride + head * tail_value_head_stride
        extra = mask + batch * mask_batch_stride + begin * mask_key_stride
        output, lse = _attend(
            q,
            token + (length - tokens),
            k + begin * tail_key_stride,
            v + begin * tail_value_stride,
            tail_key_stride,
            tail_value_stride,
            extra + token.to(tl.int64) * mask_token_stride,
            mask_key_stride,
            first,
            here,
            scale,
            softcap,
            D,
            BLOCK_N,
            KIND,
            CAPPED,
            PRECISION,
        )
        slot = (slots + split - packed_splits).to(tl.int64)
        if here > 0:
            tl.store(out + slot * count * D, output, mask=used)
        tl.store(lse_out + slot * count, lse, mask=real)
