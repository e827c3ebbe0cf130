"""S-hat: one score per token for all heads, which picks hop seeds and evidence probes."""

from __future__ import annotations

from torch import Tensor


def mean_seed_scores(tokens: Tensor, epsilon: float = 1e-12) -> Tensor:
    """S-hat [N]: scores [L, G, N] averaged over all heads and normalised to sum 1.

    `epsilon` keeps the denominator from 0; a score that is 0 everywhere stays 0.

    Source: Eq. (V3), whose scores are the direct relevance; the same
    rule for other scores is ours.
    """
    mean = tokens.mean(dim=(0, 1))
    return mean / (mean.sum() + epsilon)
