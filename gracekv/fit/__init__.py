"""Stage after packing: values and multiplicities of kept entries, fitted to foreseen queries."""

from gracekv.fit.base import FITTERS, Fitter
from gracekv.fit.none import NoFit
from gracekv.fit.queries import ReferenceQueries
from gracekv.fit.values import Values
from gracekv.fit.values_and_mass import ValuesAndMass

__all__ = [
    "FITTERS",
    "Fitter",
    "NoFit",
    "ReferenceQueries",
    "Values",
    "ValuesAndMass",
]
