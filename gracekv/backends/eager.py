"""One head at a time in float32, directly from the definition; on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, AttentionBackend, AttentionStep
from gracekv.cache.entries import LayerEntries
from gracekv.kernels.linalg import capped


@BACKENDS.register("eager")
class Eager(AttentionBackend):
    """Loops over heads in float32, on any device; slow, for checks.

    Source: Eq. (T4): log m is added to the logit.

    Cost: a Python loop over sequences and heads.
    """

    def prepare(self, layer: LayerEntries) -> LayerEntries:
        return layer

    def held_bytes(self, prepared: LayerEntries) -> int:
        return 0

    def __call__(self, step: AttentionStep) -> Tensor:
        entries: LayerEntries = step.packed
        heads = step.query.shape[1]
        group, bias = heads // entries.heads, step.tail_bias()
        output = torch.zeros_like(step.query)
        for sequence, rows in enumerate(step.rows_of(entries.sequences)):
            own_bias = 0.0 if bias is None else (bias if len(bias) == 1 else bias[rows])[:, 0]
            for head in range(heads):
                g = head // group
                keys, values, _, log_multiplicity = entries.head(g, sequence)
                query = step.scale * step.query[rows, head].float()
                tail = capped(query @ step.keys[rows, g].float().mT, step.softcap)
                packed = capped(query @ keys.float().T, step.softcap) + log_multiplicity
                logits = torch.cat([packed, tail + own_bias], dim=-1)
                # Rows that see nothing get 0.
                total = logits.logsumexp(dim=-1, keepdim=True)
                if step.sink_logits is not None:
                    total = torch.logaddexp(total, step.sink_logits[head].float())
                weights = (logits - total.clamp(min=torch.finfo(torch.float32).min)).exp()
                mixed = weights[..., : len(keys)] @ values.float()
                mixed += weights[..., len(keys) :] @ step.values[rows, g].float()
                output[rows, head] = mixed.to(output.dtype)
        return output
