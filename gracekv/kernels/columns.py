"""`Columns`: the arguments that the engines of `softmax_sums` share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Columns(NamedTuple):
    """The arguments of `softmax_sums.softmax_columns`, on the keys' device.

    Attributes:
        queries: [H, Q, d].
        keys: [G, T, d].
        seen: int64 [Q].
        weights: float32 [Q].
        scale: factor of the logits.
        power: exponent of the probabilities, at least 1.
        maximum: reduce over queries by the maximum, not the sum.
        sinks: float32 [H, Q], or None.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    weights: Tensor
    scale: float
    power: float
    maximum: bool
    sinks: Tensor | None

    @property
    def scaled(self) -> Tensor:
        """float32 [H, Q, d]: the queries times the scale."""
        queries = self.queries.float()
        return queries if self.scale == 1.0 else queries * self.scale
