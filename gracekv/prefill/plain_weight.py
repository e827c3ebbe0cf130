"""Whether a linear layer's weight can be read, or only the layer be called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain_weight(module: Any) -> Tensor | None:
    """The [out, in] weight if it is all that `module` multiplies by and can be read as numbers.

    None where it is packed or scaled (quantised), elsewhere (offloaded: "meta"), or added to
    (adapters such as LoRA, whose modules are no plain Linear): such modules can only be called.
    """
    weight = getattr(module, "weight", None)
    if (
        type(module) is torch.nn.Linear
        and isinstance(weight, Tensor)
        # Quantised weights are subclasses that say one dtype and store another.
        and type(weight) in (Tensor, torch.nn.Parameter)
        and weight.dtype in _DTYPES
        and not weight.is_meta
    ):
        return weight.detach()
    return None
