"""Attention of a step's tokens over ragged contexts and vLLM's own pages, for GPUs.

One launch serves all requests of a step, whatever their contexts; a second one merges the partial
results of tokens that several programs worked on. There are no atomics, so results are bitwise
identical in every run.

Importing this module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gracekv.backends.triton_merge_kernel import add_entries, add_splits, mask_of, normalised, read


# Do not compile again for values that differ from step to step.
@triton.jit(
    do_not_specialize=["layer", "contexts", "blocks_row_stride"],
    do_not_specialize_on_alignment=["units", "addresses", "first_slot", "blocks"],
)
def attend_units(
    units,  # [U, 6], see ContextBatch
    addresses,  # [L, C, 4], see ContextBatch
    layer,
    contexts,  # C
    places,  # [n]
    positions,  # [n]
    rows,  # [n]
    first_slot,  # [n + 1]
    query,  # [all tokens, H, D]
    query_token_stride,
    query_head_stride,
    pages,  # [blocks, G, BLOCK, 2 D]
    page_stride,
    page_head_stride,
    page_slot_stride,
    blocks,  # [R, most blocks of a row]
    blocks_row_stride,
    output,  # [all tokens, H, D]
    output_token_stride,
    output_head_stride,
    part_output,  # [S, H, D] float32
    part_lse,  # [S, H]
    scale,
    query_heads,  # H
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (unit, KV head): its queries over a part of a context, of their pages, or both."""
    unit = units + tl.program_id(0) * 6
    head = tl.program_id(1)
    context = tl.load(unit)
    reads_pages = tl.load(unit + 1)
    first = tl.load(unit + 2)
    count = tl.load(unit + 3)
    part = tl.load(unit + 4)
    parts = tl.load(unit + 5)

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    step = tl.arange(0, BLOCK_N)
    token = (first + m) // GROUP
    query_head = head * GROUP + (first + m) % GROUP
    place = tl.load(places + token, mask=m < count, other=-1)
    position = tl.load(positions + token, mask=m < count, other=-1).to(tl.int32)
    used = mask_of(place >= 0, D, BLOCK_D)
    at = place[:, None] * query_token_stride + query_head[:, None] * query_head_stride
    q = read(query + at + dim[None, :], used, UPCAST)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if context >= 0:
        where = addresses + (layer * contexts + context) * 4
        keys = tl.load(where).to(pages.dtype)
        values = tl.load(where + 1).to(pages.dtype)
        bias = tl.load(where + 2).to(tl.pointer_type(tl.float32))
        offsets = tl.load(where + 3).to(tl.pointer_type(tl.int64))
        entry = tl.load(offsets + head)
        length = tl.load(offsets + head + 1) - entry
        stop = length * (part + 1) // parts
        begin = length * part // parts
        entry += begin
        entries = (stop - begin).to(tl.int32)
        # Allocations and rows begin at multiples of 16 bytes. The compiler cannot know, and uses
        # the hint only where a pointer is added to.
        keys = tl.multiple_of(keys + entry * D, 16)
        values = tl.multiple_of(values + entry * D, 16)
        bias += entry
        for start in range(0, entries, BLOCK_N):
            n = start + step
            inside = n < entries
            # Memory past the end may hold anything, even NaN; never read it.
            valid = mask_of(inside, D, BLOCK_D)
            k = read(keys + n[:, None] * D + dim[None, :], valid, UPCAST)
            v = read(values + n[:, None] * D + dim[None, :], valid, UPCAST)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            logits += tl.load(bias + n, mask=inside, other=0.0)[None, :]
            logits = tl.where(inside[None, :], logits, float("-inf"))
            top, total, acc = add_entries(logits, v, top, total, acc, PRECISION)
    if reads_pages != 0:
        table = blocks + tl.load(rows + first // GROUP) * blocks_row_stride
        reach = tl.max(position, 0) + 1
        begin_page = (reach * part // parts).to(tl.int32)
        stop_page = (reach * (part + 1) // parts).to(tl.int32)
        for start in range(begin_page, stop_page, BLOCK_N):
            n = start + step
            inside = n < stop_page
            valid = mask_of(inside, D, BLOCK_D)
            block = tl.load(table + n // BLOCK, mask=inside, other=0).to(tl.int64)
            slot = block * page_stride + (n % BLOCK) * page_slot_stride
            slot += head.to(tl.int64) * page_head_stride
            k = read(pages + slot[:, None] + dim[None, :], valid, UPCAST)
            v = read(pages + slot[:, None] + D + dim[None, :], valid, UPCAST)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            visible = inside[None, :] & (n[None, :] <= position[:, None])
            logits = tl.where(visible, logits, float("-inf"))
            top, total, acc = add_entries(logits, v, top, total, acc, PRECISION)

    result, lse = normalised(top, total, acc)
    if (context >= 0) & (reads_pages != 0):
        final = place[:, None] * output_token_stride + query_head[:, None] * output_head_stride
        tl.store(output + final + dim[None, :], result.to(output.dtype.element_ty), mask=used)
    else:
        if context >= 0:
            split = tl.load(first_slot + token, mask=m < count, other=0) + part
        else:
            split = tl.load(first_slot + token + 1, mask=m < count, other=0) - parts + part
        row = split * query_heads + query_head
        tl.store(part_output + row[:, None] * D + dim[None, :], result, mask=used)
        tl.store(part_lse + row, lse, mask=place >= 0)


@triton.jit(do_not_specialize_on_alignment=["first_slot"])
def merge_units(
    part_output,  # [S, H, D] float32
    part_lse,  # [S, H]
    first_slot,  # [n + 1]
    places,  # [n]
    output,  # [all tokens, H, D]
    output_token_stride,
    output_head_stride,
    query_heads,  # H
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (token, query head): its output over all its slots."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    place = tl.load(places + token)
    if place >= 0:
        # Arrays of one element: plain numbers cannot be carried through the loop.
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        parts, lses = part_output + head * D, part_lse + head
        first = tl.load(first_slot + token)
        last = tl.load(first_slot + token + 1)
        top, total, acc = add_splits(
            top, total, acc, parts, lses, first, last, query_heads, D, BLOCK_D, BLOCK_S
        )
        # Every token sees itself, so the sum is positive.
        at = output + place * output_token_stride + head * output_head_stride + dim
        tl.store(at, (acc / total).to(output.dtype.element_ty), mask=dim < D)
