"""A layer's output projection for observers, for any kind of linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gracekv.distributed.sharding import own_columns

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Number of unit vectors projected at once.
_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A layer's output projection without bias, from this process's H d numbers to D.

    Attributes:
        module: maps [.., H d] to [.., D]; its bias is subtracted.
        width: H d, of this process.
    """

    module: Any
    width: int

    @property
    def columns(self) -> Tensor | None:
        """The weight [D, H d], or this process's columns of a sharded layer; None if hidden.

        It is hidden if the module can only be called (quantised, offloaded, with adapters).
        """
        if (own := own_columns(self.module)) is None:
            return plain_weight(self.module)
        return own if type(self.module) is torch.nn.Linear and own.dtype in _DTYPES else None

    def weight(self, like: Tensor) -> Tensor:
        """[D, H d]: `columns`, or the module's outputs for unit vectors.

        Args:
            like: a tensor with the dtype and device of the model's states.
        """
        if self.columns is not None:
            return self.columns
        unit = torch.eye(self.width, dtype=like.dtype, device=like.device)
        layer = getattr(self.module, "base_layer", self.module)
        names = ("input_scale", "activation_scale", "input_activation_scale")
        steps = (getattr(layer, name, None) for name in names)
        # Inputs of calibrated layers are rounded to this step and limited to 127 or more of them.
        # Many steps, as outputs may be rounded, too; a step of 0 is not calibrated.
        known = (x.detach().max() for x in steps if isinstance(x, Tensor) and not x.is_meta)
        step = next(known, None)
        size = 1.0 if step is None else torch.where(step > 0, 64 * step, 1.0).to(like)
        return torch.cat([self(rows * size) / size for rows in unit.split(_ROWS)]).T

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., D] of rows [.., H d]."""
        if (columns := self.columns) is not None:
            # Under autocast they may differ.
            rows = rows.to(columns.dtype)
        if own_columns(self.module) is None:
            return self._project(rows)
        # A sharded layer sums the outputs of all processes itself.
        if columns is not None:
            return rows @ columns.mT
        mesh = self.module.weight.device_mesh
        rank, zeros = mesh.get_local_rank(), torch.zeros_like(rows)
        # Each process in turn, while the others pass zeros.
        turns = [self._project(rows if x == rank else zeros) for x in range(mesh.size())]
        return turns[int(rank)]

    def _project(self, rows: Tensor) -> Tensor:
        # In the shape of the model's own calls, since some quantised layers take no other.
        flat = rows.reshape(1, -1, rows.shape[-1])
        weight = getattr(getattr(self.module, "base_layer", self.module), "weight", None)
        if type(weight) is torch.nn.Parameter and weight.dtype in _DTYPES:
            flat = flat.to(weight.dtype)
        projected: Tensor = self.module(flat)
        # Adapters may add a bias to a layer without one.
        if type(self.module) is not torch.nn.Linear or self.module.bias is not None:
            projected = projected - self.module(torch.zeros_like(flat[:, :1]))
        return projected.view(*rows.shape[:-1], -1)


def plain_weight(module: Any) -> Tensor | None:
    """The [out, in] weight if `module` multiplies by nothing else and it can be read as numbers.

    None if the weight is quantised, offloaded (on "meta", or empty) or has an adapter such as LoRA:
    such modules can only be called.
    """
    weight = getattr(module, "weight", None)
    if (
        type(module) is torch.nn.Linear
        and isinstance(weight, Tensor)
        # Quantised weights are subclasses that report one dtype and store another.
        and type(weight) in (Tensor, torch.nn.Parameter)
        and weight.dtype in _DTYPES
        and not weight.is_meta
        and weight.numel()
    ):
        return weight.detach()
    return None
