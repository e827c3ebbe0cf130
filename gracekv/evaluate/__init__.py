"""Benchmarks, ablations and tables of their results.

    from gracekv.evaluate import Experiment, run
    run(Experiment.load("suite.yaml"), "runs/")

Names are imported on first use, since the package's modules need transformers and the `evaluate`
extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gracekv.evaluate.experiment import Experiment, Panel
    from gracekv.evaluate.row_files import read_rows
    from gracekv.evaluate.runner import Summary, run
    from gracekv.evaluate.tables import make_tables

_HOMES = {
    "Experiment": "experiment",
    "Panel": "experiment",
    "Summary": "runner",
    "make_tables": "tables",
    "read_rows": "row_files",
    "run": "runner",
}

__all__ = ["Experiment", "Panel", "Summary", "make_tables", "read_rows", "run"]


# If type checkers saw this, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
