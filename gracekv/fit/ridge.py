"""Ridge regression towards no change, for many heads at once.

    minimise  sum_r w_r |(A x)_r - b_r|^2 + sum_c lambda_c |x_c|^2

over x [W, d]; normal equations in W unknowns, or in M where there are fewer rows than columns.

Source: ours (Tikhonov regularisation; the dual form is the push-through identity).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.linalg import batched_linear


def ridge(shares: Tensor, target: Tensor, weights: Tensor, inverse_penalty: Tensor) -> Tensor:
    """x float32 [G, W, d] of G independent problems.

    Products are made in float32, the systems are solved in float64. A column of zeros, or of an
    infinite penalty, gets 0. With S = Lambda^-1/2, x = S (S A^T W A S + I)^-1 S A^T W b, or
    x = S^2 A^T W^1/2 (W^1/2 A S^2 A^T W^1/2 + I)^-1 W^1/2 b.

    Args:
        shares: A float32 [G, M, W].
        target: b float32 [G, M, d].
        weights: w float32 [M], non-negative.
        inverse_penalty: 1 / lambda float32 [G, W], at least 0.
    """
    root = weights.sqrt()[None, :, None]
    rows = root * target
    if shares.shape[2] <= shares.shape[1]:
        scale = inverse_penalty.sqrt()
        scaled = shares * root * scale[:, None]
        return scale[..., None] * _solved(scaled.mT @ scaled, scaled.mT @ rows)
    scaled = shares * root
    # The penalty enters one factor alone: a product of two different matrices is as fast.
    left = scaled * inverse_penalty[:, None]
    solved = _solved(batched_linear(left, scaled), rows)
    return batched_linear(solved.mT.contiguous(), left.mT).mT


def _solved(gram: Tensor, right: Tensor) -> Tensor:
    """(gram + I)^-1 right in float64, for positive semidefinite gram [G, n, n]; as float32."""
    matrix = gram.double()
    matrix.diagonal(dim1=1, dim2=2).add_(1.0)
    return torch.cholesky_solve(right.double(), torch.linalg.cholesky(matrix)).float()
