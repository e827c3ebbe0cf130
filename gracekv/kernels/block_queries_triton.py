"""A block's queries on NVIDIA GPUs: rotated to another position, and their logits to near keys.

One kernel reads each query once for both. Products are accumulated in float32, those of float32
keys without tensor cores. There are no atomic operations.

Source: ours; the running log-sum-exp is flash attention's (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gracekv.kernels.addresses import contiguous_rows
from gracekv.kernels.device import interpreted
from gracekv.kernels.rope import Rope

_LOG2_E = 1.4426950408889634


def block_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Constants and launch options; BLOCK_K is at least BLOCK_Q."""
    rows = 32 if dtype == torch.float32 else 64
    return {"BLOCK_Q": rows, "BLOCK_K": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}


def moved_and_near(
    queries: Tensor, keys: Tensor, turn: Rope, near: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries [H, n, d] rotated with a table of n rows, float32, and their `near_logits` [H, n].

    The logits are those of the unrotated queries, times `scale`, to keys [G, n, d].
    """
    queries, keys = contiguous_rows(queries, keys)
    heads, count, dim = queries.shape
    moved = torch.empty(queries.shape, dtype=torch.float32, device=keys.device)
    lse = torch.empty(heads, count, dtype=torch.float32, device=keys.device)
    cos, sin = (x.to(keys.device, torch.float32).contiguous() for x in (turn.cos, turn.sin))
    sizes, rotary = block_sizes(keys.dtype), cos.shape[1]
    with torch.cuda.device_of(keys):
        turn_and_look_back[(-(-count // sizes["BLOCK_Q"]), heads)](
            queries, keys, cos, sin, moved, lse, count, dim, near, scale * _LOG2_E,
            queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1),
            GROUP=heads // len(keys), D=dim, ROTARY=rotary, SHARED=1 + turn.interleaved,
            PARTNER=1 if turn.interleaved else rotary // 2,
            # The interpreter treats bfloat16's bits as integers.
            UPCAST=interpreted(), enable_fp_fusion=True, **sizes,
        )  # fmt: skip
    return moved, lse


@triton.jit(do_not_specialize=["count", "features", "near", "scale"])
def turn_and_look_back(
    queries, keys, cos, sin, moved, lse, count, features, near, scale, query_head_stride,
    query_row_stride, key_head_stride, key_row_stride, GROUP: tl.constexpr, D: tl.constexpr,
    ROTARY: tl.constexpr, SHARED: tl.constexpr, PARTNER: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, query head).

    Args:
        queries, keys: [H, Q, D] and [G, Q, D].
        cos, sin: [Q, ROTARY].
        moved, lse: [H, Q, D] and [H, Q], written.
        count, features: Q and D.
        scale: scale of the logits, times log2(e).
        SHARED: features in a row that have one angle.
        PARTNER: how far apart features are that rotate together.
    """
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_Q
    # Rows after the last repeat it, so that each sees a key.
    q = tl.minimum(first + tl.arange(0, BLOCK_Q), count - 1)[:, None]
    asked = queries + head * query_head_stride + q.to(tl.int64) * query_row_stride
    keys += head // GROUP * key_head_stride
    top = tl.full([BLOCK_Q, 1], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q, 1], tl.float32)
    for base in range(tl.maximum(first - near + 1, 0), tl.minimum(first + BLOCK_Q, count), BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)[None, :]
        row = keys + tl.minimum(k, count - 1).to(tl.int64) * key_row_stride
        logits = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for i in range(0, features, BLOCK_D):
            feature = i + tl.arange(0, BLOCK_D)
            query = tl.load(asked + feature[None, :], mask=feature[None, :] < D, other=0.0)
            key = tl.load(row + feature[:, None], mask=feature[:, None] < D, other=0.0)
            if UPCAST:
                query, key = query.to(tl.float32), key.to(tl.float32)
            logits = tl.dot(query, key, logits, input_precision="ieee")
        logits = tl.where((k <= q) & (q - k < near), logits * scale, -float("inf"))
        # Every query sees a key of the first block, so `peak` is finite.
        peak = tl.maximum(top, tl.max(logits, 1, keep_dims=True))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(logits - peak), 1, keep_dims=True)
        top = peak
    # Repeated rows are written several times, with the same numbers.
    tl.store(lse + head * count + q, (top + tl.log2(total)) * 0.6931471805599453)  # log(2)
    for i in range(0, features, BLOCK_D):
        feature = i + tl.arange(0, BLOCK_D)[None, :]
        turned, second = feature < ROTARY, feature // PARTNER % 2 == 1
        angle = q * ROTARY + feature // SHARED
        other = asked + tl.where(second, feature - PARTNER, feature + PARTNER)
        own = tl.load(asked + feature, mask=feature < D, other=0.0).to(tl.float32)
        beside = tl.load(other, mask=turned, other=0.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=turned, other=0.0)
        value = own * tl.load(cos + angle, mask=turned, other=1.0)
        value += tl.where(second, beside, -beside) * sine
        tl.store(moved + (head * count + q) * D + feature, value, mask=feature < D)
