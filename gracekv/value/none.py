"""No sensitivity: all heads count the same."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.uploads import filled
from gracekv.prefill import LayerCapture, Prefill
from gracekv.value.sensitivity import SENSITIVITIES, Sensitivity


@SENSITIVITIES.register("none", works_sharded=True)
class NoSensitivity(Sensitivity):
    """Every head counts the same (omega = 1).

    Source: published methods, none of which weights heads.

    Cost: none.
    """

    compares_layers = False

    def __call__(self, prefill: Prefill) -> Tensor:
        """Ones [L, G]."""
        return torch.stack([self.layer(x).to(prefill.keys[0].device) for x in prefill])

    def layer(self, capture: LayerCapture) -> Tensor:
        """Ones [G]."""
        return filled(capture.kv_heads, 1.0, torch.float32, capture.keys.device)
