"""The merging packers in plain loops and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cam_probability(attention: Sequence[float], token: int, merge: int) -> float:
    """p_t of one head: `attention` is A over its N context tokens."""
    following = attention[token + 1 : token + 1 + merge]
    other = sum(following) / len(following) if following else 0.0
    if other <= 0:
        return 1.0 if attention[token] > 0 else 0.0
    return min(max(attention[token] / other, 0.0), 1.0)


def cam_replay(values: Tensor, merges: Sequence[bool], merge: int) -> Tensor:
    """One head's values [N, d] after the replay, float64; `merges[t]`: t is dropped and M_t = 1."""
    out = values.double().clone()
    for token, flows in enumerate(merges):
        targets = range(token + 1, min(token + 1 + merge, len(out)))
        if flows:
            for target in targets:
                out[target] += out[token] / len(targets)
    return out


def d2o_matches(keys: Tensor, kept: Sequence[int]) -> dict[int, tuple[float, int]]:
    """For one head's keys [N, d]: dropped token -> (u, c), its most similar kept token.

    Ties go to the lower position. Empty if nothing is kept.
    """
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    matches = {}
    for token in range(len(keys)):
        if token in kept or not kept:
            continue
        cosines = [float(unit[token] @ unit[other]) for other in sorted(kept)]
        best = max(cosines)
        matches[token] = (best, sorted(kept)[cosines.index(best)])
    return matches


def d2o_threshold(matches: Sequence[dict[int, tuple[float, int]]]) -> float:
    """tau: the mean of all u of a layer's heads."""
    similarities = [u for head in matches for u, _ in head.values()]
    return sum(similarities) / len(similarities) if similarities else math.inf


def d2o_merge(rows: Tensor, target: int, accepted: Sequence[tuple[int, float]]) -> Tensor:
    """The merged row of `target` among `rows` [N, d], float64; `accepted` holds (token, u)."""
    total, size = math.e * rows[target].double(), math.e
    for token, u in accepted:
        total = total + math.exp(u) * rows[token].double()
        size += math.exp(u)
    return total / size
