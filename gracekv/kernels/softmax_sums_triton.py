"""Column sums and maxima of softmax rows on NVIDIA GPUs; logits are never written to memory.

Two kernels compute the logits: the first keeps a log-sum-exp per query, the second reduces
probabilities over queries for a block of keys. Half-precision keys are multiplied on tensor cores
with float32 sums; queries, which are float32, are split into two parts of the keys' dtype. Float32
keys are multiplied in full float32. There are no atomic operations: results are the same to the bit
from run to run.

Source: ours; the two passes are those of flash attention's backward pass (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gracekv.kernels.columns import Columns
from gracekv.kernels.device import interpreted

LARGEST_DIM = 256
# Queries of one program of the second kernel.
_QUERIES = 256
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_sizes(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants and launch options of both kernels: 64 x 64 logits, features in blocks."""
    if dtype == torch.float32:
        return {"BLOCK_Q": 32, "BLOCK_K": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 1}
    features = min(64, max(16, 1 << (dim - 1).bit_length()))
    return {"BLOCK_Q": 64, "BLOCK_K": 64, "BLOCK_D": features, "num_warps": 4, "num_stages": 2}


def takes(queries: Tensor, keys: Tensor) -> bool:
    """Whether the kernels can read queries [H, Q, d] and keys [G, T, d]."""
    plain = type(queries) is type(keys) is Tensor
    return plain and keys.dtype in _DTYPES and keys.shape[-1] <= LARGEST_DIM


def split(queries: Tensor, dtype: torch.dtype) -> Tensor:
    """[PARTS, ...] in `dtype` whose parts add up to float32 `queries`, two if it is a half."""
    if dtype == torch.float32:
        return queries[None]
    high = queries.to(dtype)
    return torch.stack([high, (queries - high.float()).to(dtype)])


def softmax_columns(asked: Columns, sinks: Tensor) -> Tensor:
    """float32 [H, T]; as in `gracekv.kernels.softmax_sums`, on a GPU, with `sinks` [H, Q]."""
    queries, keys, seen, weights, power, maximum = asked
    heads, count, dim = queries.shape
    groups, length, _ = keys.shape
    parts = split(queries * _LOG2_E, keys.dtype).contiguous()
    keys, seen, weights = keys.contiguous(), seen.contiguous(), weights.contiguous()
    sinks = (sinks * _LOG2_E).contiguous()
    lse = torch.empty(heads, count, device=keys.device)
    chunks = -(-count // _QUERIES)
    output = torch.empty(chunks, heads, length, device=keys.device)
    sizes = block_sizes(dim, keys.dtype)
    constants = {"GROUP": heads // groups, "D": dim, "PARTS": len(parts), "UPCAST": interpreted()}
    numbers = {"count": count, "length": length, "features": dim}
    with torch.cuda.device_of(keys):
        row_logsumexp[(-(-count // sizes["BLOCK_Q"]), heads)](
            parts, keys, seen, sinks, lse, **numbers, **constants, **sizes, enable_fp_fusion=True
        )
        reduce_columns[(-(-length // sizes["BLOCK_K"]), heads, chunks)](
            parts,
            keys,
            seen,
            lse,
            weights,
            output,
            **numbers,
            chunk=_QUERIES,
            power=float(power),
            MAXIMUM=maximum,
            **constants,
            **sizes,
            enable_fp_fusion=True,
        )
    return output.amax(dim=0) if maximum else output.sum(dim=0)


@triton.jit
def _logits(
    queries,  # [PARTS, H, Q, D]; here the first part of the head's first query
    keys,  # [T, D], of the head
    q,  # [BLOCK_Q]
    known,
    k,  # [BLOCK_K]
    inside,
    part_stride,
    features,  # D
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[BLOCK_Q, BLOCK_K] float32."""
    logits = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for i in range(0, features, BLOCK_D):
        feature = i + tl.arange(0, BLOCK_D)
        used = feature < D
        key = tl.load(
            keys + k[None, :].to(tl.int64) * D + feature[:, None],
            mask=inside[None, :] & used[:, None],
            other=0.0,
        )
        if UPCAST:
            key = key.to(tl.float32)
        for part in tl.static_range(PARTS):
            query = tl.load(
                queries + part * part_stride + q[:, None].to(tl.int64) * D + feature[None, :],
                mask=known[:, None] & used[None, :],
                other=0.0,
            )
            if UPCAST:
                query = query.to(tl.float32)
            logits = tl.dot(query, key, logits, input_precision="ieee")
    return logits


@triton.jit(do_not_specialize=["count", "length", "features"])
def row_logsumexp(
    queries,  # [PARTS, H, Q, D], times the attention scale and log2(e)
    keys,  # [G, T, D]
    seen,  # [Q]
    sinks,  # [H, Q], a logit more of each query, times log2(e); -inf: none
    lse,  # [H, Q], log2 of the sums of powers of 2
    count,  # Q
    length,  # T
    features,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (block of queries, query head)."""
    head = tl.program_id(1).to(tl.int64)
    part_stride = tl.num_programs(1).to(tl.int64) * count * D
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    known = q < count
    visible = tl.load(seen + q, mask=known, other=1).to(tl.int32)
    queries += head * count * D
    keys += head // GROUP * length * D
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, tl.max(visible, 0), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        logits = _logits(
            queries, keys, q, known, k, k < length, part_stride, features, D, BLOCK_Q, BLOCK_K,
            BLOCK_D, PARTS, UPCAST,
        )  # fmt: skip
        logits = tl.where(k[None, :] < visible[:, None], logits, -float("inf"))
        # Every query sees key 0, so the first block makes `peak` finite.
        peak = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(logits - peak[:, None]), 1)
        top = peak
    keyed = top + tl.log2(total)
    sink = tl.load(sinks + head * count + q, mask=known, other=-float("inf"))
    # Without a sink the second logarithm is 0.
    peak = tl.maximum(keyed, sink)
    both = peak + tl.log2(tl.exp2(keyed - peak) + tl.exp2(sink - peak))
    tl.store(lse + head * count + q, both, mask=known)


@triton.jit(do_not_specialize=["count", "length", "features", "chunk", "power"])
def reduce_columns(
    queries,
    keys,
    seen,
    lse,
    weights,  # [Q]
    output,  # [C, H, T]
    count,
    length,
    features,
    chunk,  # queries of a program
    power,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    """Program (block of keys, query head, chunk of queries)."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    part_stride = tl.num_programs(1).to(tl.int64) * count * D
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < length
    first = tl.program_id(0) * BLOCK_K
    queries += head * count * D
    keys += head // GROUP * length * D
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, count), BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        known = q < count
        visible = tl.load(seen + q, mask=known, other=0).to(tl.int32)
        if tl.max(visible, 0) > first:
            logits = _logits(
                queries, keys, q, known, k, inside, part_stride, features, D, BLOCK_Q, BLOCK_K,
                BLOCK_D, PARTS, UPCAST,
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
