"""Stage after packing: fit values and multiplicities of kept entries to expected queries."""

from gracekv.fit.base import FITTERS as FITTERS
from gracekv.fit.base import Fitter as Fitter
from gracekv.fit.base import ReferenceQueries as ReferenceQueries
from gracekv.fit.least_squares import LeastSquares as LeastSquares
from gracekv.fit.none import NoFit as NoFit
from gracekv.fit.regression import Regression as Regression
from gracekv.fit.values import Values as Values
from gracekv.fit.values_and_mass import ValuesAndMass as ValuesAndMass
