"""The custom operator `gracekv::ragged_attention`: both kernels behind one traceable call.

Importing this module imports triton and registers the operator. `torch.compile` sees it as one
node; a CUDA graph records two launches whose grids depend only on shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gracekv.backends.triton_codes_kernel import attend_coded_splits
from gracekv.backends.triton_merge_kernel import merge_splits
from gracekv.backends.triton_split_kernel import ADDITIVE, BOOLEAN, CAUSAL, attend_splits
from gracekv.backends.triton_splits import tail_splits
from gracekv.backends.triton_tiles import merge_step, padded_dim, tiles
from gracekv.kernels.addresses import contiguous_rows
from gracekv.kernels.device import capability, interpreted

# Number of tensors and of integers per coded part.
_CODES, _CODINGS = 9, 3


@torch.library.custom_op("gracekv::ragged_attention", mutates_args=())
def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    items: Tensor,
    item_first: Tensor,
    row_first: Tensor,
    rows: Tensor | None,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_length: Tensor | None,
    mask: Tensor | None,
    scale: float,
    slots: int,
    packed_splits: int,
    programs: int,
    codes: list[Tensor],
    codings: list[int],
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention to a packed layer and a dense tail; `AttentionStep` as plain arguments.

    Args:
        query: [B, H, Tq, d].
        keys: [E, d].
        values: [E, d].
        bias: float32 [E].
        items: see `PartSplits`.
        item_first: [S+1].
        row_first: [S, G+1].
        rows: int64 [B], or None: sequences in order, each for B // S batch rows.
        tail_keys: [B, G, C, d].
        tail_values: [B, G, C, d].
        tail_length: int [B], number of places in use, or None for all C.
        mask: bool or additive float [B or 1, 1, Tq, C]; None is causal, aligned with the length.
        scale: factor of q . k.
        slots: see `SplitTable`.
        packed_splits: `PartSplits.most`.
        programs: target number of kernel programs.
        codes: for each coded part, the codes, scales and zero points of its keys, then of its
            values, as in `Codes`, float32 [E] bias, and items and item_first of its `PartSplits`.
        codings: for each coded part, its bits, group and `PartSplits.most`.
        softcap: logit softcap, or None.
        sink_logits: [H] sink logits, or None.

    Returns:
        Output [B, H, Tq, d], stored as [B, Tq, H, d].
    """
    batch, query_heads, tokens, dim = query.shape
    sequences, heads = row_first.shape[0], row_first.shape[1] - 1
    group = query_heads // heads
    count = group * tokens
    tile = tiles(dim, query.dtype, capability(query.device), count)
    block_d = padded_dim(dim)
    # The kernels need contiguous rows.
    query, tail_keys, tail_values = contiguous_rows(query, tail_keys, tail_values)
    readers = batch * -(-count // tile.queries)
    size = tail_keys.shape[2]
    splits, chunk = tail_splits(size, readers * heads, programs, tile.keys)
    width = slots + heads * splits
    part_output = query.new_empty((batch, width, count, dim), dtype=torch.float32)
    part_lse = query.new_empty((batch, width, count), dtype=torch.float32)
    dtype = query.dtype
    if interpreted() and dtype == torch.bfloat16:
        # Triton's interpreter treats the bits of bfloat16 as integers and truncates instead of
        # rounding, so it gets float32, and torch rounds.
        given = (query, keys, values, tail_keys, tail_values)
        query, keys, values, tail_keys, tail_values = (x.float() for x in given)
    output = query.new_empty((batch, tokens, query_heads, dim))
    if output.numel() == 0:
        return output.to(dtype).transpose(1, 2)

    kind = CAUSAL if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDITIVE
    mask_strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask_strides = (0 if len(mask) == 1 else mask.stride(0), *mask.stride()[2:])
    shared: dict[str, Any] = {
        "rows": rows,
        "part_output": part_output,
        "part_lse": part_lse,
        "group": group,
        "tokens": tokens,
        "per_sequence": batch // sequences,
        "D": dim,
        "BLOCK_D": block_d,
        "enable_fp_fusion": True,
    }
    attending: dict[str, Any] = {
        **shared,
        "scale": scale,
        "softcap": 1.0 if softcap is None else softcap,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "CAPPED": softcap is not None,
        "PRECISION": tile.precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    placed = {"heads": heads, "tail_splits": splits, "slots": slots}
    asked = (query, *query.stride()[:3])
    held = (keys, values, keys.stride(0), values.stride(0), bias, items, item_first)
    tail = (tail_keys, tail_values, *tail_keys.stride()[:3], *tail_values.stride()[:3])
    with torch.cuda.device_of(query):
        if packed_splits + heads * splits:
            attend_splits[(readers, packed_splits + heads * splits)](
                *(*asked, *held, *tail, tail_length),
                query if mask is None else mask,  # an unused pointer
                *mask_strides,
                **attending,
                **placed,
                tail_size=size,
                tail_chunk=chunk,
                packed_splits=packed_splits,
                KIND=int(kind.value),
            )
        for part in range(len(codings) // _CODINGS):
            stored = codes[part * _CODES : (part + 1) * _CODES]
            bits, size, most = codings[part * _CODINGS : (part + 1) * _CODINGS]
            if most:
                launch = attend_coded_splits[(readers, most)]
                launch(*asked, *stored, **attending, width=width, BITS=bits, SIZE=size)
        merge_splits[(count, heads, batch)](
            row_first=row_first,
            sink_logits=None if sink_logits is None else sink_logits.float().contiguous(),
            output=output,
            BLOCK_S=merge_step(block_d),
            **placed,
            **shared,
        )
    return output.to(dtype).transpose(1, 2)


@ragged_attention.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
