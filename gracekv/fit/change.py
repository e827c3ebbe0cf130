"""How far a fit moved the values of kept entries."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache


def value_change(packed: RaggedCache, fitted: RaggedCache) -> Tensor:
    """|v' - v| / |v| of every entry, layer after layer as packed: uint8 [E] on the CPU, hundredths.

    255 stands for 2.55 and more.
    """
    parts = [
        _relative(before.values.float(), after.values.float())
        for before, after in zip(packed.layers, fitted.layers, strict=True)
    ]
    return torch.cat([(100 * part).round().clamp(max=255).to("cpu", torch.uint8) for part in parts])


def _relative(before: Tensor, after: Tensor) -> Tensor:
    change: Tensor = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-12)
    return change
