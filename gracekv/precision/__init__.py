"""Stage after fitting: the number of bits per number of a kept entry."""

from gracekv.precision.allocated import AllocatedPrecision as AllocatedPrecision
from gracekv.precision.base import PRECISIONS as PRECISIONS
from gracekv.precision.base import AllocatingPrecision as AllocatingPrecision
from gracekv.precision.base import Precision as Precision
from gracekv.precision.full import FullPrecision as FullPrecision
from gracekv.precision.rate_distortion import RateDistortion as RateDistortion
from gracekv.precision.uniform import UniformPrecision as UniformPrecision
