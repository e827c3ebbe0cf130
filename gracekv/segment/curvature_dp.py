"""`curvature_dp`: slots that end where the hidden-state trajectory turns (the paper's)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ConfigError, NonFiniteError
from gracekv.kernels.linalg import running_sums
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import bounded
from gracekv.segment.base import SEGMENTERS, Partition, Segmenter
from gracekv.segment.curvature import Curvature, band_products, chunk_rows, hidden_at, unit_states
from gracekv.segment.surprisal import Surprisal

_OFF = "0 switches the term off."


@SEGMENTERS.register("curvature_dp", works_sharded=True)
class CurvatureDP(Segmenter):
    """Slots of 16 to 128 tokens cut where hidden states turn, by dynamic programming.

    Maximises boundary scores minus cut costs, minus dispersion and length penalties of the slots
    (Eq. (S11)). A weight of 0 switches its term off.

    Source: Eqs. (S8) and (S11); departures 2. Ours: `curvature_weight` and how ties are broken.

    Cost: banded products of the sampled hidden states for N * `max_length` candidate slots, and one
    pass over their profits; about 1 % of a prefill. Capturing surprisal costs more, about a tenth
    of a prefill on a CPU.

    Attributes:
        min_length: n_min, tokens; only the last slot may be shorter, if the end of the region
            cannot be reached otherwise (Eq. (S11)).
        max_length: n_max, tokens (Eq. (S11)).
        target_length: n_0, tokens, the length without penalty (Eq. (S11)).
        curvature_weight: weight of the normalised curvature in the boundary score (ours; 1 in
            Eq. (S8)).
        surprisal_weight: lambda_s (Eq. (S8)).
        dispersion_weight: lambda_d (Eq. (S11)).
        length_weight: lambda_n (Eq. (S11)).
        cut_cost: c_cut, paid for every slot but the first (Eq. (S11)).
        curvature: how kappa is computed. Its sampled layers and epsilon are also used for
            dispersion and robust normalisation, as in the paper.
    """

    min_length: int = bounded(16, at_least=1, hint="It is in tokens; the paper's is 16.")
    max_length: int = bounded(128, at_least=1, hint="It is in tokens; the paper's is 128.")
    target_length: int = bounded(64, at_least=1, hint="It is in tokens; the paper's is 64.")
    curvature_weight: float = bounded(1.0, at_least=0, hint=_OFF)
    surprisal_weight: float = bounded(0.15, at_least=0, hint=_OFF)
    dispersion_weight: float = bounded(0.25, at_least=0, hint=_OFF)
    length_weight: float = bounded(0.10, at_least=0, hint=_OFF)
    cut_cost: float = bounded(1.0, hint="0 makes cuts free.")
    curvature: Curvature = field(default_factory=Curvature)

    def check(self) -> None:
        if self.min_length > self.max_length:
            raise ConfigError(
                f"CurvatureDP takes min_length <= max_length, in tokens; got min_length="
                f"{self.min_length!r}, max_length={self.max_length!r}. The paper's are 16 and 128."
            )

    def needs(self) -> Needs:
        return self.curvature.needs() | Needs.observed(*self._observers)

    @property
    def _observers(self) -> tuple[Surprisal, ...]:
        return (Surprisal(),) if self.surprisal_weight > 0 else ()

    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The optimal partition, and kappa for the trees.

        Raises `MissingCaptureError` if hidden states or surprisal were not captured,
        `NonFiniteError` if they hold NaN or infinity, `ShapeError` if `region` is empty.
        """
        kappa = self.curvature(prefill)
        boundary = self.boundary_score(kappa, *map(prefill.observation, self._observers))
        own = slice(region.start, region.end)
        states = [hidden[own] for hidden in hidden_at(prefill, self.curvature.depths)]
        _, bounds = best_partition(self.slot_profits(boundary[own], states), self.min_length)
        # All processes have the same hidden states, but equal cuts must not depend on that.
        bounds, kappa = map(prefill.shard.from_first, (bounds, kappa))
        return Partition(bounds + region.start, curvature=kappa)

    def boundary_score(self, kappa: Tensor, surprisal: Tensor | None = None) -> Tensor:
        """b of every position, float64 [T], from kappa [T] and surprisal [T] (None for weight 0).

        Raises `NonFiniteError` if either has NaN or infinity. Source: Eq. (S8).
        """
        score = self.curvature_weight * robust_zscore(kappa, self.curvature.epsilon)
        if surprisal is not None:
            surprisal = surprisal.to(kappa.device)
            score = score + self.surprisal_weight * robust_zscore(surprisal, self.curvature.epsilon)
        if not bool(score.isfinite().all()):
            raise NonFiniteError(
                "The boundary score holds NaN or infinity because the captured surprisal does. "
                "Check the model's logits, or set surprisal_weight=0."
            )
        return score

    def slot_profits(self, boundary: Tensor, states: list[Tensor]) -> Tensor:
        """The profit of each candidate slot in the objective: float64 [N, n_max].

        `boundary` [N] and the sampled layers' `states` [N, D] cover the compressible region. Entry
        (a, n-1) belongs to the n tokens from a on. Starting at a > 0 earns the score of the token
        before, since the cut is after it. Source: Eqs. (S10) and (S11).
        """
        lengths = torch.arange(1, self.max_length + 1, dtype=torch.float64, device=boundary.device)
        penalty = self.length_weight * ((lengths - self.target_length) / self.target_length) ** 2
        reward = functional.pad(boundary[:-1] - self.cut_cost, (1, 0))[: len(boundary)]
        profit = reward[:, None] - penalty
        if self.dispersion_weight > 0:
            dispersion = dispersion_table(states, self.max_length, self.curvature.epsilon)
            profit -= self.dispersion_weight * dispersion.to(profit.device)
        return profit


def dispersion_table(states: Sequence[Tensor], longest: int, epsilon: float) -> Tensor:
    """Disp of every slot of at most `longest` tokens: float64 [N, longest].

    `states` are the sampled layers' block inputs over the compressible region, each [N, D]. Entry
    (a, n-1) belongs to the n tokens from relative position a on; it is 0 if the slot has fewer than
    two steps or would leave the region. The table is on the first layer's device.

    The sum of a slot's steps is its last state minus its first. So the variance of the steps needs
    one squared distance per candidate slot and a running sum of squared steps, and no prefix sums
    of vectors.

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
    squared_steps = functional.pad(running_sums(table[:, 1]), (1, longest))
    inside = squared_steps.unfold(0, longest, 1)[:rows] - squared_steps[:rows, None]
    steps = torch.arange(longest, dtype=torch.float64, device=device)
    table = (inside - table / steps.clamp(min=1)).clamp(min=0) / (steps - 1).clamp(min=1)
    fits = torch.arange(rows, device=device)[:, None] + steps < rows
    return torch.where(fits & (steps >= 2), table, 0.0)


def _squared_distances(hidden: Tensor, width: int, epsilon: float) -> Tensor:
    """[N, width] float64: |hbar_{t+j} - hbar_t|^2 of one layer [N, D]; undefined past the end."""
    length, dim = hidden.shape
    rows = chunk_rows(dim, width)
    chunks = []
    for start in range(0, length, rows):
        unit = unit_states(hidden[start : start + rows + width - 1], epsilon)
        own = min(rows, length - start)
        products = band_products(unit, width)[:own]
        squares = functional.pad(unit.square().sum(dim=-1), (0, width))
        chunks.append(squares.unfold(0, width, 1)[:own] + squares[:own, None] - 2 * products)
    return torch.cat(chunks)


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


def best_partition(profit: Tensor, min_length: int) -> tuple[Tensor, Tensor]:
    """Cut [0, N) into slots of greatest total profit.

    Computed on the CPU: the few operations per block of endpoints are too small for a GPU, so one
    copy of the profits is faster.

    Args:
        profit: [N, n_max] float64; entry (a, n-1) is the profit of the slot of n tokens from a on.
            Entries of slots that end beyond N are never read.
        min_length: n_min <= n_max, the shortest slot. Only the last slot may be shorter, and only
            if no slot within the limits reaches N.

    Returns:
        On the CPU, F [N+1], the best total up to each endpoint (-inf where none is reachable), and
        the bounds int64 [J+1], 0 and N included. Among equal totals the earliest predecessor wins.

    Source: Eq. (S12).
    """
    profit = profit.cpu()
    length, max_length = profit.shape
    device, choices = profit.device, max_length - min_length + 1
    # Endpoint i and column c belong to the predecessor i - max_length + c, so earlier predecessors
    # come first and max keeps the earliest. Along a row of `slots` the start advances and the slot
    # shrinks: one row down, one column left; hence the skewed view.
    rows = functional.pad(profit[:, min_length - 1 :], (0, 0, max_length, 0), value=-torch.inf)
    slots = rows.as_strided((length + 1, choices), (choices, choices - 1), choices - 1)
    padded = torch.full((max_length + length + 1,), -torch.inf, dtype=profit.dtype, device=device)
    best, before = padded[max_length:], padded.unfold(0, choices, 1)
    best[0] = 0.0
    choice = torch.zeros(length + 1, dtype=torch.int64, device=device)
    # No slot is shorter than min_length, so min_length consecutive endpoints are independent.
    for start in range(min_length, length + 1, min_length):
        ends = slice(start, min(start + min_length, length + 1))
        torch.max(before[ends] + slots[ends], dim=1, out=(best[ends], choice[ends]))
    previous = torch.arange(length + 1, device=device) - max_length + choice
    if length and -(-length // max_length) * min_length > length:
        # No slot within the limits reaches the end: the last one may be shorter.
        starts = torch.arange(max(0, length - max_length), length, device=device)
        totals = best[starts] + profit[starts, length - starts - 1]
        torch.max(totals, dim=0, out=(best[length], choice[length]))
        previous[length] = starts[0] + choice[length]
    bounds, predecessors = [length], previous.tolist()
    while bounds[-1] > 0:
        bounds.append(predecessors[bounds[-1]])
    return best, torch.tensor(bounds[::-1])
