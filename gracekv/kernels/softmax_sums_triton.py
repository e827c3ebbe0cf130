"""Column sums and maxima of softmax rows on NVIDIA GPUs; logits are never written to memory.

Two kernels compute the logits: the first keeps a log-sum-exp per query, the second reduces
probabilities over queries for a block of keys. Half-precision keys are multiplied on tensor cores
with float32 sums; float32 queries are split into two parts of the keys' dtype for it. Float32 keys
are multiplied in full float32. There are no atomic operations: results are the same to the bit from
run to run.

Source: ours; the two passes are those of flash attention's backward pass (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gracekv.kernels.device import interpreted
from gracekv.kernels.linalg import Columns, filled

LARGEST_DIM = 256
# Queries of one program of the second kernel.
_QUERIES = 256
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_sizes(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants and launch options of both kernels; blocks of 64 features would spill registers."""
    if dtype == torch.float32:
        return {"BLOCK_Q": 32, "BLOCK_K": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 1}
    features = min(32, max(16, 1 << (dim - 1).bit_length()))
    return {"BLOCK_Q": 64, "BLOCK_K": 64, "BLOCK_D": features, "num_warps": 4, "num_stages": 2}


def takes(queries: Tensor, keys: Tensor) -> bool:
    """Whether the kernels can read queries [H, Q, d] and keys [G, T, d]."""
    plain = type(queries) is type(keys) is Tensor
    return plain and keys.dtype in _DTYPES and keys.shape[-1] <= LARGEST_DIM


def softmax_columns(asked: Columns) -> Tensor:
    """float32 [H, T]; as in `gracekv.kernels.softmax_sums`, on a GPU."""
    queries, keys, sinks = asked.queries, asked.keys, asked.sinks
    if queries.dtype not in (keys.dtype, torch.float32):
        queries = queries.float()
    # Only features must follow one another: slices of prompts are read where they lie.
    queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys))
    heads, count, dim = queries.shape
    groups, length, _ = keys.shape
    if sinks is None:
        sinks = filled(1, -torch.inf, torch.float32, keys.device).expand(heads, count)
    chunks = -(-count // _QUERIES)
    lse = torch.empty(heads, count, device=keys.device, dtype=torch.float32)
    output = torch.empty(chunks, heads, length, device=keys.device, dtype=torch.float32)
    sizes = block_sizes(dim, keys.dtype)
    # The interpreter computes with bfloat16's bits as if they were integers.
    upcast = interpreted() and torch.bfloat16 in (queries.dtype, keys.dtype)
    shared = {
        "count": count, "length": length, "features": dim, "scale": asked.scale * _LOG2_E,
        "query_head_stride": queries.stride(0), "query_row_stride": queries.stride(1),
        "key_head_stride": keys.stride(0), "key_row_stride": keys.stride(1),
        "GROUP": heads // groups, "D": dim, "UPCAST": upcast, "enable_fp_fusion": True, **sizes,
    }  # fmt: skip
    with torch.cuda.device_of(keys):
        row_logsumexp[(-(-count // sizes["BLOCK_Q"]), heads)](
            queries[None], keys, asked.seen, sinks, lse, sink_head_stride=sinks.stride(0),
            sink_row_stride=sinks.stride(1), **shared,
        )  # fmt: skip
        reduce_columns[(-(-length // sizes["BLOCK_K"]), heads, chunks)](
            queries[None], keys, asked.seen, lse, asked.weights.contiguous(), output,
            chunk=_QUERIES, power=float(asked.power), MAXIMUM=asked.maximum, **shared,
        )  # fmt: skip
    if chunks == 1:
        return output[0]
    return output.amax(dim=0) if asked.maximum else output.sum(dim=0)


@triton.jit
def _logits(
    queries, keys, q, known, k, inside, query_row_stride, key_row_stride, scale, features,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """[BLOCK_Q, BLOCK_K] float32, in powers of 2, of a head's queries [Q, D] and keys [T, D].

    Rows `q` [BLOCK_Q] count where they are `known`, and `k` [BLOCK_K] where they are `inside`.
    """
    logits = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for i in range(0, features, BLOCK_D):
        feature = i + tl.arange(0, BLOCK_D)
        used = feature < D
        key = tl.load(
            keys + k[None, :].to(tl.int64) * key_row_stride + feature[:, None],
            mask=inside[None, :] & used[:, None],
            other=0.0,
        )
        query = tl.load(
            queries + q[:, None].to(tl.int64) * query_row_stride + feature[None, :],
            mask=known[:, None] & used[None, :],
            other=0.0,
        )
        if UPCAST:
            key, query = key.to(tl.float32), query.to(tl.float32)
        high = query.to(key.dtype)
        logits = tl.dot(high, key, logits, input_precision="ieee")
        if query.dtype != key.dtype:
            low = (query - high.to(tl.float32)).to(key.dtype)
            logits = tl.dot(low, key, logits, input_precision="ieee")
    return logits * scale


@triton.jit(do_not_specialize=["count", "length", "features", "scale"])
def row_logsumexp(
    queries,  # [1, H, Q, D]
    keys,  # [G, T, D]
    seen,  # [Q]
    sinks,  # [H, Q], the logit of each query's sink, or -inf
    lse,  # [H, Q], log2 of the sums of powers of 2
    count, length, features,  # Q, T and D
    scale,  # of the logits, times log2(e)
    query_head_stride, query_row_stride, key_head_stride, key_row_stride, sink_head_stride,
    sink_row_stride, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, query head)."""
    head = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    known = q < count
    visible = tl.load(seen + q, mask=known, other=1).to(tl.int32)
    queries += head * query_head_stride
    keys += head // GROUP * key_head_stride
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, tl.max(visible, 0), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        logits = _logits(
            queries, keys, q, known, k, k < length, query_row_stride, key_row_stride, scale,
            features, D, BLOCK_Q, BLOCK_K, BLOCK_D, UPCAST,
        )  # fmt: skip
        logits = tl.where(k[None, :] < visible[:, None], logits, -float("inf"))
        # Every query sees key 0, so the first block makes `peak` finite.
        peak = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(logits - peak[:, None]), 1)
        top = peak
    keyed = top + tl.log2(total)
    at = head * sink_head_stride + q.to(tl.int64) * sink_row_stride
    sink = tl.load(sinks + at, mask=known, other=-float("inf"))
    sink *= 1.4426950408889634  # log2(e)
    # Without a sink the second logarithm is 0.
    peak = tl.maximum(keyed, sink)
    both = peak + tl.log2(tl.exp2(keyed - peak) + tl.exp2(sink - peak))
    tl.store(lse + head * count + q, both, mask=known)


@triton.jit(do_not_specialize=["count", "length", "features", "chunk", "power", "scale"])
def reduce_columns(
    queries, keys, seen, lse,
    weights,  # [Q]
    output,  # [C, H, T]
    count, length, features,
    chunk,  # queries of a program
    power, scale, query_head_stride, query_row_stride, key_head_stride, key_row_stride,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Program (block of keys, query head, chunk of queries)."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < length
    first = tl.program_id(0) * BLOCK_K
    queries += head * query_head_stride
    keys += head // GROUP * key_head_stride
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, count), BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        known = q < count
        visible = tl.load(seen + q, mask=known, other=0).to(tl.int32)
        if tl.max(visible, 0) > first:
            logits = _logits(
                queries, keys, q, known, k, inside, query_row_stride, key_row_stride, scale,
                features, D, BLOCK_Q, BLOCK_K, BLOCK_D, UPCAST,
            )  # fmt: skip
            norm = tl.load(lse + head * count + q, mask=known, other=0.0)
            weight = tl.load(weights + q, mask=known, other=0.0)
            share = weight[:, None] * tl.exp2(power * (logits - norm[:, None]))
            share = tl.where(k[None, :] < visible[:, None], share, 0.0)
            if MAXIMUM:
                total = tl.maximum(total, tl.max(share, 0))
            else:
                total += tl.sum(share, 0)
    tl.store(output + (part * tl.num_programs(1) + head) * length + k, total, mask=inside)
