"""The auction over single tokens: a top-k, without trees.

If every slot is one token that is kept or dropped (distortion `unit`, no floor), each operation is
an Add of cost 1 and gain omega R. The greedy auction is then the top-k of the gains, or of each
head's gains under quotas. `top_tokens` selects the same tokens as the auction over the forest,
including ties. Source: ours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.operations import check_quota
from gracekv.allocate.ranking import first_fitting, where_true
from gracekv.allocate.selection import Selection
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import ConfigError, NonFiniteError
from gracekv.kernels.linalg import running_sums
from gracekv.kernels.uploads import upload

NEVER = -1.0
"""The gain of a token that may not be kept; all others are at least 0."""


def top_tokens(
    scores: Tensor,
    sensitivity: Tensor,
    budget: int,
    quota: Tensor | None,
    *,
    elastic: bool = False,
    shard: HeadShard = WHOLE,
) -> Tensor:
    """bool [L, G, N]: the tokens that the greedy auction keeps.

    Ties go to the earlier layer, head and token. Holds about 11 bytes per token of every head, and
    24 bytes per token of one layer's heads; with several processes also about 60 bytes for each
    token among this one's `budget` best.

    Args:
        scores: R^tok [L, G, N].
        sensitivity: omega [L, G].
        budget: maximum entries in all heads, including those of other processes.
        quota: int64 [L, G] maximum entries of each head, or None.
        elastic: drop tokens of gain <= 0.
        shard: this process's heads; by default all.

    Raises:
        NonFiniteError: a gain is NaN or infinite.
        ShapeError: the quota is not [L, G].
    """
    layers, heads, tokens = scores.shape
    check_scores(scores, sensitivity)
    omega = sensitivity.to(scores.device).double()
    quota = check_quota(quota, layers, heads)
    keep = torch.empty_like(scores, dtype=torch.bool)
    # Rounding to float32 keeps the order; new ties are resolved in float64 below.
    rough = torch.empty_like(scores, dtype=torch.float32)
    for layer in range(layers):
        caps = None if quota is None else quota[layer]
        rough[layer] = candidates(scores[layer], omega[layer], caps, elastic)
        torch.ge(rough[layer], 0, out=keep[layer])
    count = int(torch.count_nonzero(keep))
    if shard.total(count) <= budget:
        return keep
    if budget == 0:
        return torch.zeros_like(keep)
    if count > budget:
        # A token that is not among the best here is not among those of all processes. Gains are at
        # least 0, so dropped tokens come last.
        flat = rough.masked_fill_(~keep, -1.0).flatten()
        cut = kth_largest(flat, budget)
        keep = (flat > cut).view_as(scores)
        tied = where_true(flat == cut)
        room = budget - int(torch.count_nonzero(keep))
        if room < len(tied):
            exact = _gains(scores.flatten()[tied], omega.flatten()[tied // tokens])
            tied = tied[exact.sort(descending=True, stable=True).indices[:room]]
        keep.view(-1)[tied] = True
    if shard.ranks > 1:
        at = where_true(keep.flatten())
        gains = _gains(scores.flatten()[at], omega.flatten()[at // tokens])
        place = shard.among_all(at, heads * tokens)
        keep.view(-1)[at] = first_fitting(gains, place, torch.ones_like(at), budget, shard)
    return keep


def candidates(scores: Tensor, sensitivity: Tensor, caps: Tensor | None, elastic: bool) -> Tensor:
    """The gains, float64 [G, N], of one layer's tokens; `NEVER` for those that may not be kept.

    Args:
        scores: R^tok [G, N].
        sensitivity: omega [G].
        caps: int64 [G] maximum entries of each head, or None.
        elastic: leave out tokens of gain <= 0.
    """
    gain = _gains(scores, sensitivity.to(scores.device).double()[:, None])
    if caps is not None:
        # Ranks by a stable sort: ties go to the earlier token.
        order = gain.sort(dim=1, descending=True, stable=True).indices
        rank = torch.arange(gain.shape[1], device=gain.device)
        # Equal caps need no upload.
        equal = caps.device.type == "cpu" and len(set(caps.tolist())) == 1
        limit = int(caps[0]) if equal else caps.to(gain.device)[:, None]
        beyond = (rank >= limit).expand_as(gain)
        gain = gain.masked_fill(torch.empty_like(beyond).scatter_(1, order, beyond), NEVER)
    return gain.masked_fill(gain <= 0, NEVER) if elastic else gain


def entry_gains(scores: Tensor, sensitivity: Tensor, selection: Selection) -> Tensor:
    """float64 [E]: the summed gains of all tokens that each entry of `selection` stands for."""
    device, omega = scores.device, sensitivity.to(scores.device).double()
    head = upload(selection.head_of_entry(), device)
    start = selection.start.to(device).long() - selection.region[0]
    gains = _gains(scores.flatten(0, 1)[head, start], omega.flatten()[head])
    if selection.end is None:
        return gains
    end = selection.end.to(device).long() - selection.region[0]
    sums = torch.nn.functional.pad(running_sums(_gains(scores, omega[..., None])), (1, 0))
    merged = sums.flatten(0, 1)[head, end] - sums.flatten(0, 1)[head, start]
    # A single token has exactly its own gain.
    return torch.where(end - start > 1, merged, gains)


def _gains(scores: Tensor, omega: Tensor) -> Tensor:
    """Delta_add = omega R, clipped at 0, float64, Eq. (A5)."""
    # -0.0 becomes 0.0, too.
    return torch.threshold(scores * omega, 0.0, 0.0)


def check_scores(scores: Tensor, sensitivity: Tensor, *, signed: bool = True) -> None:
    """Raise `NonFiniteError` if R^tok or omega [any shape] hold NaN or infinity.

    Unless R^tok may be `signed`, raise `ConfigError` if it has negative numbers. Synchronises once
    with a GPU.
    """
    # x - x is 0, or NaN if x is not finite or is the root of a negative number.
    known = scores if signed else scores.sqrt()
    bad, worse = ((x - x).any() for x in (known, sensitivity.to(scores.device)))
    if bool(bad | worse):
        if not bool(worse) and bool(scores.isfinite().all()):
            raise ConfigError(
                "Scores are negative, and negative ones count as 0. Return 1 / norm instead of "
                "-norm, or subtract the minimum."
            )
        raise NonFiniteError(
            "Scores or sensitivities hold NaN or infinity, so tokens cannot be ranked. Check the "
            "scorer for overflow."
        )


def largest(values: Tensor, count: int) -> Tensor:
    """bool, same shape as `values` [...]: the `count` largest of all; ties go to the earlier.

    `count` is from 0 to the number of values. A GPU sorts them, which takes few short kernels.
    """
    flat = values.flatten()
    if count in (0, len(flat)):
        return torch.full_like(values, count > 0, dtype=torch.bool)
    if flat.device.type != "cpu":
        best = flat.sort(descending=True, stable=True).indices[:count]
        return torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, best, True).view_as(values)
    cut = kth_largest(flat, count)
    above, tied = flat > cut, flat == cut
    return torch.where(tied, tied.cumsum(0) <= count - above.sum(), above).view_as(values)


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest of `values` [n], k from 1 to n, as a 0-dimensional tensor."""
    if values.device.type == "cpu":
        place = len(values) - k
        return torch.from_numpy(np.partition(values.numpy(), place)[place : place + 1])[0]
    return torch.topk(values, k, sorted=False).values.amin()
