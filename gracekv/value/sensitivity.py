"""The interface of sensitivities: how much each head matters."""

from __future__ import annotations

import abc
from typing import ClassVar

from torch import Tensor

from gracekv.prefill import LayerCapture, Prefill, PrefillReader
from gracekv.registry import Registry, Strategy


class Sensitivity(PrefillReader, Strategy, abc.ABC):
    """How much each (layer, KV head) matters for the output: [L, G] float32 of mean 1.

    Attributes:
        compares_layers: whether the weight of a layer depends on other layers.
    """

    compares_layers: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, prefill: Prefill) -> Tensor:
        """omega [L, G] float32, positive, of mean 1."""

    def layer(self, capture: LayerCapture) -> Tensor:
        """omega [G] of one layer, for strategies that do not compare layers."""
        raise AssertionError(f"{self.name!r} compares layers")


SENSITIVITIES = Registry("sensitivity", "how much each KV head matters", Sensitivity)
