"""The probes: queries that measure how well a prototype replaces its tokens.

Source: the paper, "Prototype distortion" (up to 32 + 16 + 2*8 probes, query heads in turn); how the
evidence slots' representatives are chosen: departures 4 (ours).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.prefill import Prefill
from gracekv.segment.base import Partition


def distortion_probes(
    prefill: Prefill,
    partition: Partition,
    seed_scores: Tensor,
    *,
    question: int = 32,
    tail: int = 16,
    slots: int = 8,
    per_slot: int = 2,
) -> Tensor:
    """Absolute positions of the probes, int64 [P] ascending, on the CPU.

    Question and tail probes, and the `per_slot` tokens of largest S-hat in each of the `slots`
    slots of largest total S-hat; ties go to the earlier slot or token.

    Args:
        prefill: has the spans.
        partition: J slots over the region of N tokens.
        seed_scores: S-hat [N].
        question: probes from the question's end.
        tail: probes from the sequence's end.
        slots: evidence slots.
        per_slot: representatives of each.
    """
    probes = set(prefill.spans.direct_probes(question, tail))
    if slots and per_slot:
        score = seed_scores.double().cpu()
        bounds = partition.bounds - partition.bounds[0]
        total = torch.segment_reduce(score, "sum", lengths=partition.lengths, unsafe=True)
        for slot in total.argsort(descending=True, stable=True)[:slots].tolist():
            a, b = int(bounds[slot]), int(bounds[slot + 1])
            best = score[a:b].argsort(descending=True, stable=True)[:per_slot] + a
            probes.update((best + partition.bounds[0]).tolist())
    return torch.tensor(sorted(probes), dtype=torch.int64)


def probe_queries(prefill: Prefill, layer: int, probes: Tensor) -> Tensor:
    """[G, P, d] float32: probe i of KV head g uses query head g*n + i mod n."""
    queries = prefill.queries_at(layer, probes).float()
    n, heads = prefill.group, prefill.kv_heads
    turn = torch.arange(len(probes), device=queries.device) % n
    head = torch.arange(heads, device=queries.device)[:, None] * n + turn
    return queries[head, torch.arange(len(probes), device=queries.device)]
