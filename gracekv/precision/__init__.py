"""Stage after fitting: how many bits the numbers of an entry take."""

from gracekv.precision.allocated import AllocatedPrecision
from gracekv.precision.base import PRECISIONS, Precision
from gracekv.precision.full import FullPrecision
from gracekv.precision.uniform import UniformPrecision

__all__ = [
    "PRECISIONS",
    "AllocatedPrecision",
    "FullPrecision",
    "Precision",
    "UniformPrecision",
]
