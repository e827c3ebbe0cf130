"""Inner products of neighbouring rows: the band beside the diagonal of a Gram matrix.

Curvature and dispersion need only products of states a few dozen tokens apart. Small overlapping
matrix products compute them in float64, a chunk of the sequence at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import NonFiniteError

# Rows per matrix product: (rows + width) / width times the needed products are computed, so small
# blocks suit narrow bands; below 64 the overhead of a call shows.
_BLOCK = 64
_CHUNK_BYTES = 64 * 2**20


def unit_states(hidden: Tensor, epsilon: float) -> Tensor:
    """Rows of `hidden` [n, D] divided by max(norm, epsilon): [n, D] float64.

    Raises `NonFiniteError` if a row holds NaN or infinity.
    Source: Eq. (S2).
    """
    hidden = hidden.double()
    norm: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    if not bool(norm.isfinite().all()):
        raise NonFiniteError(
            "The hidden states hold NaN or infinity, so slots cannot be cut from them. Check the "
            "model's weights and dtype (float16 overflows in some models: try bfloat16)."
        )
    return hidden / norm.clamp(min=epsilon)


def band_products(x: Tensor, width: int, before: int = 0, after: int = 0) -> Tensor:
    """[n, width]: entry (t, j) is x_t . x_{t+j} for the rows of x [m, D]; 0 past the last row.

    n = `before` + m + `after`: with so many rows of zeros around x.
    """
    rows, dim = before + len(x) + after, x.shape[1]
    blocks = -(-rows // _BLOCK)
    span = _BLOCK + width - 1
    end = blocks * _BLOCK + width - 1 - before - len(x)
    padded = functional.pad(x, (0, 0, before, end))
    left = padded[: blocks * _BLOCK].view(blocks, _BLOCK, dim)
    gram = torch.bmm(left, padded.unfold(0, span, _BLOCK)).contiguous()
    # The diagonal of row r is column r: a row stride of span + 1 follows the diagonal.
    band = gram.as_strided((blocks, _BLOCK, width), (_BLOCK * span, span + 1, 1))
    return band.reshape(-1, width)[:rows]


def rows_per_chunk(row_values: int, overlap: int) -> int:
    """How many rows of `row_values` float64 numbers to hold at once; never fewer than `overlap`."""
    return max(_CHUNK_BYTES // (8 * row_values), overlap, 1)
