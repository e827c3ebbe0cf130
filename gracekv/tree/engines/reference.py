"""The prototype's distortion directly from the equations: float64, one interval at a time.

Slow on purpose; the engines are tested equal to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.prototype import Prototype
from gracekv.tree.tree_batch import TreeContext


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePrototype:
    """One merged entry.

    Attributes:
        key: [d], rotated to `position`.
        value: [d].
        position: absolute token position.
        multiplicity: m_eff, in tokens.
    """

    key: Tensor
    value: Tensor
    position: int
    multiplicity: float


def prototype_of(
    context: TreeContext, layer: int, head: int, start: int, end: int
) -> ReferencePrototype:
    """The entry of tokens [start, end), Eqs. (T1) to (T3)."""
    prefill, rule = context.prefill, context.rule
    keys = prefill.keys[layer][head].double()
    values = prefill.values[layer][head].double()
    if end - start == 1:
        return ReferencePrototype(keys[start], values[start], start, 1.0)
    origin, count = context.partition.region.start, end - start
    # Python's round goes half to even, as `representative_positions` does.
    position = round(sum(range(start, end)) / count)
    rope = prefill.rope_of(layer)
    unrotated = [rope.unrotate(keys[t : t + 1], torch.tensor([t]))[0] for t in range(start, end)]
    mean_key = sum(unrotated[1:], unrotated[0]) / count
    scores = [float(context.scores[layer, head, t - origin]) for t in range(start, end)]
    weights = [score + rule.uniform_base * sum(scores) / count for score in scores]
    if sum(weights) <= 0:
        weights = [1.0] * count
    value = torch.zeros_like(values[0])
    for weight, t in zip(weights, range(start, end), strict=True):
        value = value + weight * values[t]
    norm_mean = sum(float(key.norm()) for key in unrotated) / count
    coherence = float(mean_key.norm()) / (norm_mean + rule.epsilon)
    multiplicity = min(max(count * coherence**2, 1.0), float(count)) if rule.multiplicity else 1.0
    return ReferencePrototype(
        key=rope.rotate(mean_key[None], torch.tensor([position]))[0],
        value=value / (sum(weights) + rule.epsilon),
        position=position,
        multiplicity=multiplicity,
    )


class ReferenceDistortion:
    """D, D^drop and probe masses of one (layer, KV head)."""

    def __init__(self, context: TreeContext, layer: int, head: int, distortion: Prototype) -> None:
        self.context, self.layer, self.head, self.weights = context, layer, head, distortion
        prefill, region = context.prefill, context.partition.region
        self.keys = prefill.keys[layer][head].double()
        self.values = prefill.values[layer][head].double()
        self.probes: list[tuple[int, Tensor, float, float]] = []
        for i, position in enumerate(distortion.probes(context).tolist()):
            if position < region.start:
                continue
            queries = prefill.queries_at(layer, [position]).double()
            query = queries[head * prefill.group + i % prefill.group, 0]
            visible = range(region.start, min(region.end, position + 1))
            logits = [self._logit(query, self.keys[t]) for t in visible]
            top = max(logits)
            total = sum(math.exp(logit - top) for logit in logits)
            self.probes.append((position, query, top, total))

    def _logit(self, query: Tensor, key: Tensor) -> float:
        logit, cap = float(query @ key) * self.context.prefill.scale, self.context.prefill.softcap
        return logit if cap is None else cap * math.tanh(logit / cap)

    def node(self, start: int, end: int) -> float:
        """D([start, end)), Eqs. (T6) and (T7)."""
        if end - start == 1:
            return 0.0
        weights = self.weights
        prototype = prototype_of(self.context, self.layer, self.head, start, end)
        terms = []
        for position, query, top, total in self.probes:
            if position < end - 1:
                continue
            mass = [math.exp(self._logit(query, self.keys[t]) - top) for t in range(start, end)]
            z = sum(mass)
            m = torch.zeros_like(self.values[0])
            for p, t in zip(mass, range(start, end), strict=True):
                m = m + p * self.values[t]
            z_tilde = prototype.multiplicity * math.exp(self._logit(query, prototype.key) - top)
            m_tilde = z_tilde * prototype.value
            d_q = weights.lambda_z * (z - z_tilde) ** 2 / (z**2 + weights.epsilon)
            lost = weights.lambda_m * float((m - m_tilde).square().sum())
            d_q += lost / (float(m.square().sum()) + weights.epsilon)
            terms.append(z / total * d_q)
        return sum(terms) / len(terms)

    def masses(self, start: int, end: int) -> list[float]:
        """Mean normalised mass of each token of [start, end) over the probes that see all of it."""
        seeing = [probe[1:] for probe in self.probes if probe[0] >= end - 1]
        masses = []
        for key in self.keys[start:end]:
            each = [math.exp(self._logit(query, key) - top) / total for query, top, total in seeing]
            masses.append(sum(each) / len(seeing))
        return masses

    def drop(self, start: int, end: int) -> float:
        """D^drop([start, end))."""
        return sum(self.masses(start, end))
