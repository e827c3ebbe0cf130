"""Ridge regression towards no change, for many heads at once.

    minimise  sum_r w_r |(A x)_r - b_r|^2 + sum_c lambda_c |x_c|^2

over x [W, d]; normal equations in W unknowns, or in M where there are fewer rows than columns.

Source: ours (Tikhonov regularisation; the dual form is the push-through identity).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ridge(shares: Tensor, target: Tensor, weights: Tensor, penalty: Tensor) -> Tensor:
    """x float32 [G, W, d] of G independent problems.

    Products are made in float32, the systems are solved in float64. A column of zeros gets 0.

    Args:
        shares: A float32 [G, M, W].
        target: b float32 [G, M, d].
        weights: w float32 [M], non-negative.
        penalty: lambda float32 [G, W], positive.
    """
    root = weights.sqrt()[None, :, None]
    a, b = shares * root, target * root
    if a.shape[2] <= a.shape[1]:
        gram = (a.mT @ a).double()
        gram.diagonal(dim1=1, dim2=2).add_(penalty.double())
        return _solved(gram, (a.mT @ b).double()).float()
    scaled = a / penalty[:, None]
    gram = (scaled @ a.mT).double()
    gram.diagonal(dim1=1, dim2=2).add_(1.0)
    return scaled.mT @ _solved(gram, b.double()).float()


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix^-1 right for symmetric positive definite matrices [G, n, n]."""
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))
