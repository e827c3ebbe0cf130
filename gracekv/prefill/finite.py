"""Whether a long tensor holds NaN or infinity."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that are summed at once.
_TOKENS = 1024


def is_finite(tensor: Tensor) -> bool:
    """Whether all of `tensor` [.., T, d] is finite, without a copy of its size."""
    # A NaN or an infinity survives a sum; float64, since long float16 sums overflow. In parts,
    # since torch copies what it sums in another dtype.
    sums = [part.sum(dtype=torch.float64) for part in tensor.split(_TOKENS, dim=1)]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())
