"""Robust normalisation of a signal along the sequence."""

from __future__ import annotations

from torch import Tensor


def robust_zscore(signal: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(a - median) / (1.4826 MAD + epsilon) of a signal [T]: float64 [T], never clipped.

    Source: Eq. (S7). A constant signal gives zeros.
    """
    centred = signal.double() - _median(signal.double())
    return centred / (1.4826 * _median(centred.abs()) + epsilon)


def _median(signal: Tensor) -> Tensor:
    # torch.median takes the lower of the middle two of an even count, not their mean.
    ordered, length = signal.sort().values, len(signal)
    return ordered[(length - 1) // 2].lerp(ordered[length // 2], 0.5)
