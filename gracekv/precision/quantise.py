"""Numbers to codes, scales and zero points."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.coded import Codes, Coding, Grouping
from gracekv.errors import NonFiniteError
from gracekv.kernels import ragged

METADATA_BYTES = 2
"""Of a scale, and of a zero point."""


def quantise(numbers: Tensor, lengths: Tensor, coding: Coding, by: Grouping) -> Codes:
    """Codes of `numbers` [E, d], whose rows hold `lengths` (int64 [rows], on the CPU) entries.

    Scales and zero points are of the numbers' dtype; of float32 numbers, float16.

    Raises `NonFiniteError` if a number is NaN or infinite, or beyond float16 for float32 numbers.
    """
    x = numbers.float()
    kind = torch.float16 if numbers.dtype == torch.float32 else numbers.dtype
    if by == "channel":
        row, block = ragged.rows_and_steps(ragged.blocks(lengths, coding.group))
        begin = ragged.offsets(lengths)[row] + block * coding.group
        count = (ragged.offsets(lengths)[row + 1] - begin).clamp(max=coding.group)
        # A short block repeats its last entry, which changes neither its range nor its codes.
        step = torch.arange(coding.group).minimum(count[:, None] - 1)
        grouped = x[(begin[:, None] + step).to(x.device)].mT
    else:
        grouped = x.unflatten(1, (-1, min(coding.group, x.shape[1])))
    # [N, d, group] by channel, [E, d / group, group] by token.
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    scale, zero = _scale_and_zero(low, high, 2**coding.bits - 1, kind)
    if not bool((scale.isfinite() & zero.isfinite()).all()):
        raise NonFiniteError(
            f"Entries hold NaN, infinity or numbers beyond {torch.finfo(kind).max:g}, which scales "
            f"and zero points of 16 bits cannot represent. Use precision 'full'."
        )
    wide_scale, wide_zero = scale.float()[..., None], zero.float()[..., None]
    codes = ((grouped - wide_zero) / wide_scale).round_().nan_to_num_(0.0)
    codes = codes.clamp_(0, 2**coding.bits - 1).to(torch.uint8)
    codes[low == high] = 1
    if by == "channel":
        within = torch.arange(coding.group) < count[:, None]
        flat = codes.mT[within.to(codes.device)]
    else:
        flat = codes.flatten(1)
    return Codes(_packed(flat, coding.bits), scale, zero)


def as_read(numbers: Tensor, lengths: Tensor, coding: Coding, by: Grouping) -> Tensor:
    """float32 [E, d]: what the codes of `numbers` [E, d] are read as; see `quantise`."""
    codes = quantise(numbers, lengths, coding, by)
    if by == "token":
        return codes.numbers(0, len(numbers), coding.bits, None)
    row, step = ragged.rows_and_steps(lengths)
    block = ragged.offsets(ragged.blocks(lengths, coding.group))[row] + step // coding.group
    return codes.numbers(0, len(numbers), coding.bits, block)


def _scale_and_zero(
    low: Tensor, high: Tensor, levels: int, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """16-bit numbers with zero <= low and zero + levels * scale >= high, the nearest such.

    Where low = high, the zero point is the number nearest to it, and the scale, which codes of 1
    then add, what is missing: nothing for 16-bit numbers, nearly nothing for float32.
    """
    zero = _rounded(low.double(), kind, up=False)
    scale = _rounded((high.double() - zero.double()) / levels, kind, up=True)
    near = low.to(kind)
    constant = low == high
    zero = torch.where(constant, near, zero)
    return torch.where(constant, (low - near.float()).to(kind), scale), zero


def _rounded(x: Tensor, kind: torch.dtype, *, up: bool) -> Tensor:
    """The nearest number of the 16-bit dtype `kind` that is not below x (`up`), or not above."""
    near = x.to(kind)
    bits = near.view(torch.int16)
    grows = (near > 0) == up
    # The next number in that direction: one more bit pattern away from 0, or one towards it.
    beyond = torch.where(grows, bits + 1, bits - 1)
    smallest = torch.tensor(1 if up else -(2**15) + 1, dtype=torch.int16, device=x.device)
    beyond = torch.where(near == 0, smallest, beyond).view(kind)
    wrong = near.double() < x if up else near.double() > x
    return torch.where(wrong, beyond, near)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [E, d * bits / 8] of codes uint8 [E, d]; see `Codes`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    parts: Tensor = codes.unflatten(1, (8 // bits, -1)) << shifts
    return parts.sum(dim=1, dtype=torch.uint8)
