"""The interface of fitters, which change what kept entries say, never which are kept."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.prefill import Prefill, PrefillReader, Region
from gracekv.registry import Registry, Strategy
from gracekv.value import Memory


class Fitter(PrefillReader, Strategy, abc.ABC):
    """Fit the kept entries so that attention over them gives what attention over all gave.

    Two steps: `reference` notes what a layer gives while all of it is there, `layer` fits the
    entries that stayed, when the rest is gone. Positions and the number of entries stay, and keys,
    but where a strategy says that it moves them.
    Entries outside the compressible region (prefix, recent window, question) stay bit for bit.
    Deterministic; computed in float32 or better; values return to the cache's dtype. Finite values
    stay finite.
    """

    @property
    def by_layer(self) -> bool:
        """Whether `reference` can be made while the layers above are not read yet."""
        return True

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P] on the CPU: positions whose queries `reference` reads."""
        return torch.zeros(0, dtype=torch.int64)

    def reference(self, prefill: Prefill, layer: int, region: Region, memory: Memory) -> Any:
        """What `layer` needs of the tokens of one layer; as for `gracekv.value.LayerScorer`."""
        return None

    @abc.abstractmethod
    def layer(self, packed: RaggedEntries, reference: Any, region: Region) -> RaggedEntries:
        """The entries of one layer, those of `region` fitted."""

    def __call__(self, prefill: Prefill, region: Region, cache: RaggedCache) -> RaggedCache:
        """Fit the entries of `region` in the packed cache of one sequence.

        Raises `MissingCaptureError` if a query was not captured.
        """
        memory: Memory = {}
        prefill = prefill.with_queries(self.asks(prefill, region, memory))
        layers = (
            self.layer(packed, self.reference(prefill, number, region, memory), region)
            for number, packed in enumerate(cache.layers)
        )
        return dataclasses.replace(cache, layers=tuple(layers))


FITTERS = Registry("fit", "how kept entries make up for dropped ones", Fitter)


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
