"""Column sums and maxima of softmax rows on NVIDIA GPUs; logits are never written to memory.

Two kernels compute the logits: the first keeps the log-sum-exp of each query over parts of the
keys, the second reduces probabilities over queries for a block of keys. Half-precision keys are
multiplied on tensor cores with float32 sums; float32 queries are split into two parts of the keys'
dtype for this. Float32 keys are multiplied in full float32. There are no atomic operations, so
results are bitwise reproducible.

Source: ours; the two passes are those of flash attention's backward pass (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gracekv.kernels.addresses import contiguous_rows
from gracekv.kernels.device import capability, interpreted
from gracekv.kernels.linalg import Columns
from gracekv.kernels.uploads import filled

# Maximum features that a program of half-precision keys holds at once.
_WHOLE = 128
# Queries per program of the second kernel: 256, or 1,024 if the keys alone give 1,024 programs.
# With fewer than 128 programs of the first kernel its keys are cut into 16 parts, with fewer than
# 1,024 into 4 (ours).
_QUERIES, _MORE_QUERIES, _ENOUGH = 256, 1024, 1024
_SPLITS = ((128, 16), (1024, 4))
_LOG2_E = 1.4426950408889634


def block_sizes(
    dim: int, dtype: torch.dtype, capability: tuple[int, int], count: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options of the two kernels for `count` queries.

    Float32 and large heads are read in blocks of 32 features, since more would spill registers.
    Hopper's matrix instructions read shared memory and leave registers for larger blocks; these are
    the best of six shapes for each kernel on an H200.
    """
    names = ("BLOCK_Q", "BLOCK_K", "BLOCK_D", "num_warps", "num_stages")
    features = max(16, 1 << (dim - 1).bit_length())
    if dtype == torch.float32:
        rows = columns = (32, 64, 32, 4, 1)
    elif features > _WHOLE:
        rows, columns = (64, 64, 32, 4, 2), (32, 64, 32, 4, 2)
    elif capability[0] == 9:
        rows = (64 if count <= 64 else 128, 64, features, 4, 3)
        columns = (64, 128, features, 4, 2)
    else:
        rows, columns = (64, 64, features, 4, 2), (32, 64, features, 4, 2)
    return dict(zip(names, rows, strict=True)), dict(zip(names, columns, strict=True))


def softmax_columns(asked: Columns) -> Tensor:
    """float32 [H, T]; as in `gracekv.kernels.softmax_sums`, on a GPU."""
    queries, keys, sinks = asked.queries, asked.keys, asked.sinks
    heads, count, dim = queries.shape
    groups, length, _ = keys.shape
    of_rows, of_columns = block_sizes(dim, keys.dtype, capability(keys.device), count)
    # Only features must be contiguous: slices of prompts are read in place.
    queries, keys = contiguous_rows(queries, keys)
    parts = queries[None]
    if queries.dtype != keys.dtype:
        parts = keys.new_empty(2, *queries.shape)
        torch.sub(queries, parts[0].copy_(queries), out=parts[1])
    if interpreted() and keys.device.type == "cpu" and keys.dtype == torch.bfloat16:
        # The interpreter treats bfloat16's bits as integers.
        parts, keys = parts.float(), keys.float()
    if sinks is None:
        sinks = filled(1, -torch.inf, torch.float32, keys.device).expand(heads, count)
    rows, columns = -(-count // of_rows["BLOCK_Q"]), -(-length // of_columns["BLOCK_K"])
    splits = next((n for few, n in _SPLITS if rows * heads < few), 1)
    queries_each = _MORE_QUERIES if columns * heads >= _ENOUGH else _QUERIES
    chunks = -(-count // queries_each)
    lse = torch.empty(splits, heads, count, device=keys.device, dtype=torch.float32)
    output = torch.empty(chunks, heads, length, device=keys.device, dtype=torch.float32)
    shared = {
        "count": count, "length": length, "features": dim, "scale": asked.scale * _LOG2_E,
        "part_stride": parts.stride(0), "query_head_stride": parts.stride(1),
        "query_row_stride": parts.stride(2), "key_head_stride": keys.stride(0),
        "key_row_stride": keys.stride(1), "GROUP": heads // groups, "D": dim, "PARTS": len(parts),
        "SPLITS": splits, "enable_fp_fusion": True,
    }  # fmt: skip
    with torch.cuda.device_of(keys):
        row_logsumexp[(rows, heads, splits)](
            parts, keys, asked.seen, sinks, lse, sink_head_stride=sinks.stride(0),
            sink_row_stride=sinks.stride(1), **shared, **of_rows,
        )  # fmt: skip
        reduce_columns[(columns, heads, chunks)](
            parts, keys, asked.seen, lse, asked.weights.contiguous(), output,
            power=float(asked.power), MAXIMUM=asked.maximum, CHUNK=queries_each, **shared,
            **of_columns,
        )  # fmt: skip
    if chunks == 1:
        return output[0]
    return output.amax(dim=0) if asked.maximum else output.sum(dim=0)


@triton.jit
def _tile(rows, inside, i, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[n, BLOCK_D] of `rows` [n, 1] of D numbers: those from `i` on, 0 where not `inside` [n]."""
    feature = i + tl.arange(0, BLOCK_D)
    used = inside[:, None] & (feature < D)[None, :]
    return tl.load(rows + feature[None, :], mask=used, other=0.0)


@triton.jit
def _logits(
    asked, known, rows, inside, part_stride, held, low_held, features, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_Q, BLOCK_K] float32 products of queries and keys.

    Rows `asked` [BLOCK_Q, 1] of PARTS queries count where they are `known`, and `rows` [BLOCK_K, 1]
    of keys where they are `inside`. With all features in a block, HOLDS says whose are `held`: the
    queries' ("q") or the keys' ("k").
    """
    logits = tl.zeros([asked.shape[0], rows.shape[0]], tl.float32)
    if BLOCK_D >= D:
        if HOLDS == "q":
            high, low = held, low_held
            key = _tile(rows, inside, 0, D, BLOCK_D)
        else:
            key = held
            high = _tile(asked, known, 0, D, BLOCK_D)
            low = high
            if PARTS == 2:
                low = _tile(asked + part_stride, known, 0, D, BLOCK_D)
        logits = tl.dot(high, tl.trans(key), logits, input_precision="ieee")
        if PARTS == 2:
            logits = tl.dot(low, tl.trans(key), logits, input_precision="ieee")
    else:
        for i in range(0, features, BLOCK_D):
            key = tl.trans(_tile(rows, inside, i, D, BLOCK_D))
            high = _tile(asked, known, i, D, BLOCK_D)
            logits = tl.dot(high, key, logits, input_precision="ieee")
            if PARTS == 2:
                low = _tile(asked + part_stride, known, i, D, BLOCK_D)
                logits = tl.dot(low, key, logits, input_precision="ieee")
    return logits


@triton.jit(do_not_specialize=["count", "length", "features", "scale"])
def row_logsumexp(
    queries,  # [PARTS, H, Q, D], whose sum is asked
    keys,  # [G, T, D]
    seen,  # [Q]
    sinks,  # [H, Q], the logit of each query's sink, or -inf
    lse,  # [SPLITS, H, Q], log2 of the sums of powers of 2 over each part of the keys
    count, length, features,  # Q, T and D
    scale,  # of the logits, times log2(e)
    part_stride, query_head_stride, query_row_stride, key_head_stride, key_row_stride,
    sink_head_stride, sink_row_stride, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, query head, part of the keys). The sink counts in the first."""
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    known = q < count
    visible = tl.load(seen + q, mask=known, other=1).to(tl.int32)
    asked = queries + head * query_head_stride + q[:, None].to(tl.int64) * query_row_stride
    keys += head // GROUP * key_head_stride
    at = head * sink_head_stride + q.to(tl.int64) * sink_row_stride
    top = tl.load(sinks + at, mask=q < tl.where(split == 0, count, 0), other=-float("inf"))
    top *= 1.4426950408889634  # log2(e)
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    held = tl.zeros([BLOCK_Q, BLOCK_D], keys.dtype.element_ty)
    low = held
    if BLOCK_D >= D:
        held = _tile(asked, known, 0, D, BLOCK_D)
        if PARTS == 2:
            low = _tile(asked + part_stride, known, 0, D, BLOCK_D)
    # Every query sees the keys before this one, whose logits need no mask.
    least = tl.min(tl.where(known, visible, length), 0)
    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_K) * BLOCK_K
    stop = tl.minimum((split + 1) * span, tl.max(visible, 0))
    for start in range(split * span, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows, inside = keys + k[:, None].to(tl.int64) * key_row_stride, k < length
        logits = _logits(
            asked, known, rows, inside, part_stride, held, low, features, D, BLOCK_D, PARTS, "q"
        )
        if start + BLOCK_K > least:
            logits = tl.where(k[None, :] < visible[:, None], logits, -float("inf"))
        peak = tl.maximum(top, scale * tl.max(logits, 1))
        # A query may see nothing of its part of the keys.
        base = tl.where(peak == -float("inf"), 0.0, peak)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits * scale - base[:, None]), 1)
        top = peak
    out = (split * tl.num_programs(1) + head) * count + q
    # Where nothing was seen, `top` is -inf.
    tl.store(lse + out, top + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=known)


@triton.jit(do_not_specialize=["count", "length", "features", "power", "scale"])
def reduce_columns(
    queries, keys, seen, lse,
    weights,  # [Q]
    output,  # [C, H, T]
    count, length, features, power, scale, part_stride, query_head_stride, query_row_stride,
    key_head_stride, key_row_stride, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    MAXIMUM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (block of keys, query head, CHUNK queries)."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.program_id(0) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    inside = k < length
    queries += head * query_head_stride
    rows = keys + head // GROUP * key_head_stride + k[:, None].to(tl.int64) * key_row_stride
    held = tl.zeros([BLOCK_K, BLOCK_D], keys.dtype.element_ty)
    if BLOCK_D >= D:
        held = _tile(rows, inside, 0, D, BLOCK_D)
    # The first query that sees one of these keys: ascending ones after it do too.
    every = part * CHUNK + tl.arange(0, CHUNK)
    ends = tl.load(seen + every, mask=every < count, other=0).to(tl.int32)
    begin = tl.min(tl.where(ends > first, every, count), 0)
    # Every query sees the whole block, so that its logits need no mask.
    covered = tl.min(tl.where(every < count, ends, length), 0) >= first + BLOCK_K
    split = tl.arange(0, SPLITS)[:, None]
    # Added up at the end, since other warps hold the other rows. Tensor cores give each thread two
    # rows, 8 apart: their sum takes half of the registers.
    FOLD: tl.constexpr = 1 if keys.dtype.element_ty == tl.float32 else 2
    total = tl.zeros([BLOCK_Q // FOLD // 8, 8, BLOCK_K], tl.float32)
    for start in range(begin, tl.minimum((part + 1) * CHUNK, count), BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        known = (q < count) & (q < (part + 1) * CHUNK)
        visible = tl.load(seen + q, mask=known, other=0).to(tl.int32)
        asked = queries + q[:, None].to(tl.int64) * query_row_stride
        logits = _logits(
            asked, known, rows, inside, part_stride, held, held, features, D, BLOCK_D, PARTS, "k"
        )
        if not covered:
            logits = tl.where(k[None, :] < visible[:, None], logits, -float("inf"))
        at = (split * tl.num_programs(1) + head) * count + q[None, :]
        some = tl.load(lse + at, mask=known[None, :], other=0.0)
        peak = tl.max(some, 0)
        norm = power * (peak + tl.log2(tl.sum(tl.exp2(some - peak[None, :]), 0)))
        weight = tl.load(weights + q, mask=known, other=0.0)
        share = weight[:, None] * tl.exp2(logits * (power * scale) - norm[:, None])
        share = tl.reshape(share, (BLOCK_Q // FOLD // 8, FOLD, 8, BLOCK_K))
        total = tl.maximum(total, tl.max(share, 1)) if MAXIMUM else total + tl.sum(share, 1)
    total = tl.reshape(total, (BLOCK_Q // FOLD, BLOCK_K))
    reduced = tl.max(total, 0) if MAXIMUM else tl.sum(total, 0)
    at = (part * tl.num_programs(1) + head) * length + k
    tl.store(output + at, reduced, mask=inside)
