r"""Dispersion of the steps inside every candidate slot, as one banded table.

The sum of a slot's steps is its last state minus its first. So the variance of the steps needs one
squared distance per candidate slot and a running sum of squared steps, and no prefix sums of
vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.segment.band_products import band_products, rows_per_chunk, unit_states


def dispersion_table(states: Sequence[Tensor], longest: int, epsilon: float) -> Tensor:
    """Disp of every slot of at most `longest` tokens: float64 [N, longest].

    `states` are the sampled layers' block inputs over the compressible region, each [N, D]. Entry
    (a, n-1) belongs to the n tokens from relative position a on; it is 0 where fewer than two
    steps lie inside, and where the slot would leave the region. The table lies on the first
    layer's device. Raises `NonFiniteError` if a state holds NaN or infinity.

    Source: Eq. (S9).
    """
    device, rows = states[0].device, states[0].shape[0]
    table = torch.zeros(rows, longest, dtype=torch.float64, device=device)
    if longest < 3 or rows < 3:
        return table
    for hidden in states:
        table += _squared_distances(hidden, longest, epsilon).to(device)
    table /= len(states)
    # The variance is linear in these sums, so the mean over layers is taken first.
    squared_steps = functional.pad(table[:, 1].cumsum(0), (1, 0))
    squared_steps = functional.pad(squared_steps, (0, longest))
    inside = squared_steps.unfold(0, longest, 1)[:rows] - squared_steps[:rows, None]
    steps = torch.arange(longest, dtype=torch.float64, device=device)
    table = (inside - table / steps.clamp(min=1)).clamp(min=0) / (steps - 1).clamp(min=1)
    fits = torch.arange(rows, device=device)[:, None] + steps < rows
    return torch.where(fits & (steps >= 2), table, 0.0)


def _squared_distances(hidden: Tensor, width: int, epsilon: float) -> Tensor:
    """[N, width] float64: |hbar_{t+j} - hbar_t|^2 of one layer [N, D]; undefined past the end."""
    length, dim = hidden.shape
    rows = rows_per_chunk(dim, width)
    chunks = []
    for start in range(0, length, rows):
        unit = unit_states(hidden[start : start + rows + width - 1], epsilon)
        own = min(rows, length - start)
        products = band_products(unit, width)[:own]
        squares = functional.pad(unit.square().sum(dim=-1), (0, width))
        chunks.append(squares.unfold(0, width, 1)[:own] + squares[:own, None] - 2 * products)
    return torch.cat(chunks)
