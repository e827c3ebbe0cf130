"""Softmax in Triton: running over entries, and the kernel that merges the splits of each query.

Splits are merged by their log-sum-exps, in the order of the slots and without atomics, so results
are bitwise reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(logits, softcap):
    """softcap * tanh(logits / softcap) to float32's last bits; a NaN stays one."""
    x = logits / softcap
    size = tl.minimum(tl.abs(x), 20.0)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    square = x * x
    # Cephes' polynomial: near 0 the quotient would cancel.
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    return softcap * tl.where(tl.abs(x) >= 0.625, tl.where(x < 0, -far, far), near)


@triton.jit
def mask_of(rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which numbers of a block are used: those of `rows`, without the padding of their features."""
    used = rows[:, None]
    if BLOCK_D != D:
        used = used & (tl.arange(0, BLOCK_D) < D)[None, :]
    return used


@triton.jit
def read(at, used, UPCAST: tl.constexpr):
    """Numbers, 0 where none is used; as float32 where the interpreter lacks their products."""
    numbers = tl.load(at, mask=used, other=0.0)
    return numbers.to(tl.float32) if UPCAST else numbers


@triton.jit
def add_entries(logits, v, top, total, acc, PRECISION: tl.constexpr):
    """The running maximum, sum and output [BLOCK_M, BLOCK_D] with entries of values `v` added."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen nothing yet has -inf - -inf, which is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(logits - base[:, None])
    decay = tl.exp(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def normalised(top, total, acc):
    """Output and log-sum-exp; 0 and -inf of rows that see nothing."""
    safe = tl.where(total > 0, total, 1.0)
    return acc / safe[:, None], tl.where(total > 0, top + tl.log(safe), float("-inf"))


@triton.jit
def add_splits(
    top,
    total,
    acc,
    part_output,  # of slot 0 and this query
    part_lse,
    first,
    last,
    count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add slots [first, last) to the running maximum, sum and output."""
    dim = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        lse = tl.load(part_lse + slot * count, mask=slot < last, other=float("-inf"))
        # Splits without visible entries have not written their output.
        used = (lse > float("-inf"))[:, None] & (dim < D)[None, :]
        at = part_output + (slot * count)[:, None] * D + dim[None, :]
        part = tl.load(at, mask=used, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(lse - base)
        decay = tl.exp(top - base)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["tail_splits", "slots", "per_sequence"])
def merge_splits(
    part_output,
    part_lse,
    row_first,  # see SplitTable
    rows,
    sink_logits,  # [H] float32, or None
    output,  # [B, Tq, H, D], contiguous
    heads,
    group,
    tokens,
    tail_splits,
    slots,
    per_sequence,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (query row m of a KV head, KV head, batch row): its output over all its splits."""
    m = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    count = group * tokens
    first_part = batch * (slots + heads * tail_splits) * count + m
    parts = part_output + first_part * D
    lses = part_lse + first_part
    query_head = head * group + m // tokens
    # Arrays of one element: plain numbers cannot be carried through the loop.
    if sink_logits is not None:
        # A part without a value, whose sum of exponentials is 1 relative to its own logit.
        top = tl.load(sink_logits + query_head + tl.arange(0, 1))
        total = tl.full([1], 1.0, tl.float32)
    else:
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    sequence = batch // per_sequence if rows is None else tl.load(rows + batch)
    row = row_first + sequence * (heads + 1) + head
    first = tl.load(row)
    last = tl.load(row + 1)
    top, total, acc = add_splits(
        top, total, acc, parts, lses, first, last, count, D, BLOCK_D, BLOCK_S
    )
    first = (slots + head * tail_splits).to(tl.int64)
    last = first + tail_splits
    top, total, acc = add_splits(
        top, total, acc, parts, lses, first, last, count, D, BLOCK_D, BLOCK_S
    )
    safe = tl.where(total > 0, total, 1.0)
    token = m % tokens
    at = output + ((batch * tokens + token) * heads * group + query_head) * D + dim
    tl.store(at, (acc / safe).to(output.dtype.element_ty), mask=dim < D)
