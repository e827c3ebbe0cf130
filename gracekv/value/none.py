"""No sensitivity: all heads count the same."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gracekv.prefill import Prefill
from gracekv.value.base import SENSITIVITIES, Sensitivity


@SENSITIVITIES.register("none", works_sharded=True)
class NoSensitivity(Sensitivity):
    """Every head counts the same (omega = 1).

    Source: the published rivals, none of which weighs heads.

    Cost: none.
    """

    by_layer: ClassVar[bool] = True

    def __call__(self, prefill: Prefill) -> Tensor:
        """Ones [L, G]."""
        return torch.ones(prefill.layers, prefill.kv_heads, device=prefill.keys[0].device)
