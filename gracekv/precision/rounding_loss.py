"""What rounding an entry costs beside dropping it, measured on the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from gracekv.cache.coded import Coding
from gracekv.precision.quantise import as_read
from gracekv.prefill import Prefill, Region

# Evenly spaced tokens that are rounded, and last prompt positions whose queries meet them. Ours.
_TOKENS, _QUERIES = 256, 16


def rounding_loss(prefill: Prefill, region: Region, codings: Sequence[Coding]) -> Tensor:
    r"""float64 [L*G, C]: error of a rounded entry's output over the error of dropping it.

    Rounding adds d_v + (q . d_k) (v - mean) to an entry's share of the output, where q is a query
    times the attention scale; dropping the entry takes v - mean. The loss is the root of the mean
    square over tokens and queries, sqrt(|d_v|^2 / |v - mean|^2 + (q . d_k)^2).

    Source: ours.

    Args:
        prefill: one sequence.
        region: whose tokens are rounded; one head's sample in blocks of its own.
        codings: C ways to store them.
    """
    count = min(_TOKENS, region.length)
    at = region.start + torch.arange(count) * region.length // max(1, count)
    asking = list(prefill.spans.last(_QUERIES))
    lengths, dim = torch.full((prefill.kv_heads,), count), prefill.entry_dim
    found = []
    for layer, (all_keys, all_values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
        place = at.to(all_keys.device)
        keys, values = (x[:, place, :dim].flatten(0, 1) for x in (all_keys, all_values))
        queries = prefill.queries_at(layer, asking)[..., :dim].float() * prefill.scale
        queries = rearrange(queries, "(g n) p d -> g (n p) d", g=prefill.kv_heads)
        spread = values.float().unflatten(0, (-1, count))
        spread = (spread - spread.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2))
        for coding in codings:
            read = as_read(keys, lengths, coding, coding.keys)
            off = (read - keys.float()).unflatten(0, (-1, count))
            of_keys = (queries @ off.mT).square().mean(dim=(1, 2))
            read = as_read(values, lengths, coding, coding.values)
            of_values = (read - values.float()).square().unflatten(0, (-1, count)).sum(dim=(1, 2))
            # Values that are all alike are rounded to themselves.
            of_values = of_values / spread.clamp_min(torch.finfo(torch.float32).tiny)
            found.append((of_keys + of_values).sqrt().cpu())
    by_layer = torch.stack(found).unflatten(0, (prefill.layers, len(codings)))
    losses: Tensor = by_layer.mT.flatten(0, 1).double()
    return losses
