"""Reads bytes at any addresses of a GPU's memory in one launch; importing this imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def bytes_at(addresses: Tensor) -> Tensor:
    """uint8 [n]: the bytes at `addresses`, int64 [n], in the memory of their device."""
    found = torch.empty_like(addresses, dtype=torch.uint8)
    with torch.cuda.device_of(found):
        launch = read_bytes[(-(-len(found) // 1024),)]
        launch(addresses, found, len(found), BLOCK=1024, enable_fp_fusion=True)
    return found


@triton.jit(do_not_specialize=["count"])
def read_bytes(addresses, found, count, BLOCK: tl.constexpr):
    """Program (block): the bytes at `BLOCK` of the addresses [count], to uint8 `found` [count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    where = tl.load(addresses + place, mask=inside, other=0).to(tl.pointer_type(tl.uint8))
    tl.store(found + place, tl.load(where, mask=inside, other=0), mask=inside)
