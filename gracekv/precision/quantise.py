"""Quantises numbers to codes, scales and zero points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.cache.coded import CodedEntries, Codes, Coding
from gracekv.errors import NonFiniteError
from gracekv.kernels import ragged

METADATA_BYTES = 2
"""Bytes of a scale, and of a zero point."""


def quantised(groups: Tensor, dim: int, *levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups of numbers that share a scale and a zero point, at each of C widths.

    `groups` are floating-point numbers with a group along the negative `dim`; codes of each width
    are at most its number in `levels`. The zero point is the largest 16-bit number that is not
    above a group, the scale the smallest with which `levels` steps reach its largest number. A
    group of equal numbers has the nearest 16-bit number as its zero point and the remaining
    difference as its scale: zero for 16-bit numbers, nearly zero for float32.

    Returns:
        Codes as float32 [C, ...], scales [C, ...] and zero points [...], both of length 1 along
        `dim`. These have the dtype of `groups`, or float16 for wider numbers. Scales are not finite
        if numbers are not, or if 16 bits cannot represent them: see `check_finite`.
    """
    kind = torch.float16 if groups.dtype.itemsize > 2 else groups.dtype
    x = groups.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = low.to(kind)
    if groups.dtype.itemsize > 2:
        zero = torch.where(low == high, zero, _next(zero, zero.double() > low, up=False))
    span = high.double() - zero
    scales = [span / most for most in levels]
    scale = torch.stack(scales) if len(scales) > 1 else scales[0][None]
    near = scale.to(kind)
    scale = _next(near, near < scale, up=True)
    if groups.dtype.itemsize > 2:
        scale = torch.where(low == high, (low - zero).to(kind), scale)
    # Between 0 and `levels`, given how zero points and scales are rounded. Only groups of equal
    # numbers divide by 0; their code is 1.
    return ((x - zero) / scale).round_().nan_to_num_(1.0, 1.0, 1.0), scale, zero


def _next(numbers: Tensor, where: Tensor, *, up: bool) -> Tensor:
    """16-bit `numbers`, `where` True replaced by the next ones above (`up`) or below."""
    bits = numbers.view(torch.int16)
    if up:
        # Scales are at least 0, so the next bit pattern is the next larger number.
        return (bits + where).view(numbers.dtype)
    beyond = torch.where(numbers == 0, -(2**15) + 1, torch.where(numbers > 0, bits - 1, bits + 1))
    return torch.where(where, beyond, bits).to(torch.int16).view(numbers.dtype)


def check_finite(numbers: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise `NonFiniteError` unless all scales [...], or results computed from them, are finite.

    `dtype` is that of the entries. Synchronises with GPUs once for all `numbers`.
    """
    # x - x is 0 only for finite x. Layers may be on several GPUs.
    bad = [(x - x).any().to(numbers[0].device) for x in numbers]
    if bad and bool(torch.stack(bad).any()):
        kind = torch.float16 if dtype.itemsize > 2 else dtype
        raise NonFiniteError(
            f"Entries hold NaN, infinity or numbers beyond {torch.finfo(kind).max:g}, which scales "
            f"and zero points of 16 bits cannot represent. Use precision 'full'."
        )


def blocks_of(lengths: Tensor, size: int) -> Tensor:
    """int64 [N, size]: the entries of each block of `size` consecutive entries of a row.

    A short block repeats its last entry, which changes neither its range nor its codes. Rows have
    `lengths` (int64 [rows]) entries.
    """
    first = ragged.offsets(lengths)
    row, block = ragged.rows_and_steps(ragged.blocks(lengths, size))
    begin = first[row] + block * size
    return (begin[:, None] + torch.arange(size)).minimum(first[row + 1][:, None] - 1)


def coded(part: RaggedEntries, blocks: Tensor, coding: Coding) -> CodedEntries:
    """The entries of `part` as codes; `blocks` int64 [N, size] are those of its keys.

    See `blocks_of`. The caller must check the scales with `check_finite`.
    """
    most, dim = coding.most, part.dim
    codes, scale, zero = quantised(part.keys[blocks], -2, most)
    flat = torch.empty(part.keys.shape, dtype=torch.uint8, device=part.device)
    # Rows repeated in a short block have the same codes.
    flat.index_copy_(0, blocks.flatten(), codes.to(torch.uint8).view(-1, dim))
    keys = Codes(_packed(flat, coding.bits), scale[0, :, 0], zero[:, 0])
    codes, scale, zero = quantised(part.values.unflatten(1, (-1, min(coding.group, dim))), -1, most)
    flat = codes[0].to(torch.uint8).flatten(1)
    values = Codes(_packed(flat, coding.bits), scale[0, ..., 0], zero[..., 0])
    index = (part.positions, part.log_multiplicity, part.offsets)
    return CodedEntries(keys, values, *index, coding, part.sequences)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [E, d * bits / 8] of codes uint8 [E, d]; see `Codes`."""
    parts = codes.chunk(8 // bits, dim=1)
    return reduce(torch.bitwise_or, (x << bits * n for n, x in enumerate(parts) if n), parts[0])
