"""`Columns`: the arguments that the engines of `softmax_sums` share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Columns(NamedTuple):
    """The checked arguments of `softmax_sums.softmax_columns`, as every engine takes them.

    Attributes:
        queries: float32 [H, Q, d].
        keys: [G, T, d].
        seen: int64 [Q].
        weights: float32 [Q].
        power: exponent of the probabilities, at least 1.
        maximum: reduce over queries by the maximum, not the sum.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    weights: Tensor
    power: float
    maximum: bool
