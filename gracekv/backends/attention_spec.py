"""`AttentionSpec`: what one layer's attention asks of a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gracekv.cache.coded import Coding
from gracekv.cache.entries import LayerEntries


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention asks of a backend, known before the first query.

    Attributes:
        device: where queries, keys and values lie.
        dtype: of the queries and of entries that are not quantised; None: any.
        dim: d, the head dimension; None: any.
        codings: how quantised entries are stored, a coding for each width; () if none are.
        softcap: whether the model caps its logits.
        sink_logits: whether the model adds sink logits to its softmax.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    dim: int | None = None
    codings: tuple[Coding, ...] = ()
    softcap: bool = False
    sink_logits: bool = False

    @classmethod
    def of(
        cls, entries: LayerEntries, *, softcap: bool = False, sink_logits: bool = False
    ) -> AttentionSpec:
        """That of attention to `entries`, by a model with or without the two options."""
        layout = (entries.device, entries.dtype, entries.dim, entries.codings)
        return cls(*layout, softcap, sink_logits)
