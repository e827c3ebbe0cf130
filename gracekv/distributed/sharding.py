"""Whether a model's weights are sharded over processes."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded(model: Any) -> bool:
    """Whether each process holds only a part of the model's weights.

    True for transformers' `tp_plan` (`DistributedConfig(tp_size=...)`), for FSDP, and for linear
    layers whose weight is smaller than what they say of themselves. A `device_map` does not shard.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return True
    # There is no DTensor where its module was never imported.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(isinstance(x, tensors.DTensor) for x in model.parameters()):
        return True
    return any(
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.is_floating_point()
        and module.weight.numel() not in (0, module.out_features * module.in_features)
        for module in model.modules()
    )
