"""Tensors as compiled kernels take them: contiguous, by address, without a check of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.errors import ShapeError

CPU = torch.device("cpu")


def contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` [..., d]; those whose rows of d numbers are not contiguous as copies."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def address(
    name: str, tensor: Tensor, dtype: torch.dtype, *shape: int, device: torch.device = CPU
) -> int:
    """The address of a contiguous tensor [shape] of `dtype`, by default on the CPU.

    Raises `ShapeError` with the tensor's `name` for any other tensor: a kernel would read or write
    out of bounds.
    """
    fits = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
    if not fits or tensor.device != device:
        raise ShapeError(
            f"A compiled kernel takes {name!r} as a contiguous tensor {list(shape)} of {dtype} on "
            f"{device}; got {list(tensor.shape)} of {tensor.dtype}, strides "
            f"{list(tensor.stride())}, on {tensor.device}."
        )
    return tensor.data_ptr()
