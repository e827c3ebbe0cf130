"""A layer's output projection as observers read it, for any kind of linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gracekv.distributed.sharding import own_columns

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Unit vectors that go through a projection at once.
_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A layer's output projection without its bias, from this process's H d numbers to D.

    Attributes:
        module: maps [.., H d] to [.., D]; a bias is taken off.
        width: H d, of this process.
    """

    module: Any
    width: int

    @property
    def columns(self) -> Tensor | None:
        """The weight [D, H d], of a sharded layer this process's columns; None if hidden.

        It is hidden where the module can only be called (quantised, offloaded, with adapters).
        """
        if (own := own_columns(self.module)) is None:
            return plain_weight(self.module)
        return own if type(self.module) is torch.nn.Linear and own.dtype in _DTYPES else None

    def weight(self, like: Tensor) -> Tensor:
        """[D, H d]: `columns`, or what the module makes of unit vectors.

        Args:
            like: a tensor of the dtype and on the device of the model's states.
        """
        if self.columns is not None:
            return self.columns
        unit = torch.eye(self.width, dtype=like.dtype, device=like.device)
        layer = getattr(self.module, "base_layer", self.module)
        steps = (getattr(layer, name, None) for name in ("input_scale", "activation_scale"))
        # Inputs of calibrated layers are rounded to this step, and end at some hundred of them.
        known = (x.detach().max() for x in steps if isinstance(x, Tensor) and not x.is_meta)
        step = next(known, None)
        size = 1.0 if step is None else 16 * step.to(like)
        return torch.cat([self(rows * size) / size for rows in unit.split(_ROWS)]).T

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., D] of rows [.., H d]."""
        if (columns := self.columns) is not None:
            # Under autocast they may differ.
            rows = rows.to(columns.dtype)
        if own_columns(self.module) is None:
            return self._called(rows)
        # The layer itself adds up what all processes make of their columns.
        if columns is not None:
            return rows @ columns.mT
        mesh = self.module.weight.device_mesh
        own, others = mesh.get_local_rank(), torch.zeros_like(rows)
        # Each process in turn, beside zeros of the others.
        turns = [self._called(rows if x == own else others) for x in range(mesh.size())]
        return turns[int(own)]

    def _called(self, rows: Tensor) -> Tensor:
        # As the model calls it: some quantised layers take nothing else.
        flat = rows.reshape(1, -1, rows.shape[-1])
        own = getattr(getattr(self.module, "base_layer", self.module), "weight", None)
        if type(own) is torch.nn.Parameter and own.dtype in _DTYPES:
            flat = flat.to(own.dtype)
        projected: Tensor = self.module(flat)
        # Adapters may add a bias that the layer itself lacks.
        if type(self.module) is not torch.nn.Linear or self.module.bias is not None:
            projected = projected - self.module(torch.zeros_like(flat[:, :1]))
        return projected.view(*rows.shape[:-1], -1)


def plain_weight(module: Any) -> Tensor | None:
    """The [out, in] weight if it is all that `module` multiplies by and can be read as numbers.

    None where it is packed or scaled (quantised), elsewhere (offloaded: "meta", or empty), added to
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
        and weight.numel()
    ):
        return weight.detach()
    return None
