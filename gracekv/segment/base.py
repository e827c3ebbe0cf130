"""`Partition` and the interface of segmenters."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.prefill import Prefill, PrefillReader, Region
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Ordered slots S_1..S_J that cover the compressible region, shared by all heads.

    Attributes:
        bounds: int64 [J+1] absolute positions on the CPU; slot j is [bounds[j], bounds[j+1]).
        curvature: kappa, float [T] over the whole sequence, or None if the segmenter did not
            compute it. Trees cut at its peaks; they compute it if it is None.

    Raises:
        ShapeError: the bounds do not strictly increase.
    """

    bounds: Tensor
    curvature: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bounds.ndim != 1 or len(self.bounds) < 2 or bool((self.bounds.diff() <= 0).any()):
            raise ShapeError(
                f"Partition.bounds must be strictly increasing, with at least two positions; got "
                f"{self.bounds.tolist()[:8]}."
            )

    @property
    def lengths(self) -> Tensor:
        """int64 [J], in tokens."""
        return self.bounds.diff()

    @property
    def slots(self) -> int:
        """J."""
        return len(self.bounds) - 1

    @property
    def region(self) -> Region:
        """The covered positions."""
        return Region(int(self.bounds[0]), int(self.bounds[-1]))


class Segmenter(PrefillReader, Strategy, abc.ABC):
    """Cut the compressible region into slots.

    Pure and deterministic. The slots cover `region` exactly, in order.
    """

    @abc.abstractmethod
    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The slots of `region`, bounds int64 [J+1]."""


SEGMENTERS = Registry("segment", "where the context is cut into slots", Segmenter)
