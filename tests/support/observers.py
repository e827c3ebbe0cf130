"""Observers that only tests use."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gracekv.prefill.observer import LayerObserver


@dataclass(frozen=True)
class HeadOutputs(LayerObserver):
    """Attention outputs before the output projection at the question's probes, [L, H, P_q, d]."""

    reads: ClassVar = frozenset({"outputs"})

    def shape(self, prefill):
        probes = len(prefill.spans.question_probes())
        return prefill.layers, prefill.query_heads, probes, prefill.entry_dim

    def accumulator(self, layer, layers, spans):
        return _AtProbes(torch.tensor(spans.question_probes()))


class _AtProbes:
    def __init__(self, probes):
        self.probes, self.parts = probes, []

    def add(self, run):
        inside = self.probes[(self.probes >= run.start) & (self.probes < run.end)]
        self.parts.append(run.outputs[:, (inside - run.start).to(run.outputs.device)])

    def result(self):
        return torch.cat(self.parts, dim=1)
