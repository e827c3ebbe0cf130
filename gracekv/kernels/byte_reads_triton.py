"""Reads bytes of many tensors on a GPU in one launch, by their addresses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def bytes_at(addresses: Tensor) -> Tensor:
    """uint8 [n]: the bytes at `addresses`, int64 [n] on the GPU whose memory they belong to."""
    output = torch.empty_like(addresses, dtype=torch.uint8)
    with torch.cuda.device_of(addresses):
        _read[(triton.cdiv(len(addresses), _BLOCK),)](addresses, output, len(addresses), _BLOCK)
    return output


@triton.jit(do_not_specialize=["count"])
def _read(addresses, output, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    address = tl.load(addresses + at, mask=inside, other=0)
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
    tl.store(output + at, byte, mask=inside)
