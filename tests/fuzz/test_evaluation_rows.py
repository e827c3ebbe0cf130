"""Crafted rows of an evaluation are valid or raise named errors."""

import json
from pathlib import Path
from random import Random

from gracekv.errors import ConfigError
from gracekv.evaluate import Experiment
from gracekv.evaluate.formats import FORMATS, footer
from gracekv.evaluate.measures import MEASURES
from gracekv.evaluate.row_files import read_rows
from gracekv.evaluate.runner import make_schedule
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tables import make_tables
from support.covering import cases
from support.evaluation_rows import row, written
from support.mutations import mutated_bytes, mutated_data

CASES = cases(120, 2000)
METHODS = ("fullkv", "gracekv", "snapkv")


def use(folder, experiment, rng):
    """Everything that reads rows: the schedule of a resumed run, and tables."""
    rows = read_rows(folder)
    schedule = make_schedule(experiment, rows, Sources())
    assert sum(len(sample.cells) for sample in schedule.samples) + schedule.done == 3 * len(METHODS)
    footer(rows)
    for name in rng.sample(sorted(MEASURES), 3):
        measure = MEASURES[name]
        for form in FORMATS.values():
            form(make_tables(rows, measure, "gracekv"), measure).encode()


def test_crafted_rows_are_refused(tmp_path, tally):
    panel = {"tasks": ["ruler:vt"], "methods": METHODS, "ratios": [2], "lengths": [1024]}
    experiment = Experiment.from_dict({"model": "tiny", "samples": 3, **panel})
    # Rows of three methods, with every field that rows can hold.
    costs = {
        "entries": {"spent": 10, "full": 40}, "bytes": {"kv": 10, "full_kv": 40},
        "construction_seconds": 0.5, "ms_per_token": 3.0, "prediction": "a",
    }  # fmt: skip
    rows = [
        row(method, "full" if method == "fullkv" else "2x", index, index / 3, "ruler:vt", **costs)
        for method in METHODS
        for index in range(3)
    ]
    rows[4] |= {"error": {"type": "BudgetError", "message": "small", "where": "at:1"}}
    rows[5] |= {"questions": [{"fidelity": {"kl": 0.1}}, {"fidelity": {"kl": 0.2}}]}
    folder = written(tmp_path / "runs", rows)
    path = Path(folder / "rows-main.jsonl")
    good = path.read_bytes()
    for seed in range(CASES):
        rng = Random(seed)
        if seed % 3 == 0:
            kind, broken = mutated_bytes(good, rng)
        else:
            at = rng.randrange(len(rows))
            kind, changed = mutated_data(rows[at], rng)
            lines = [changed if number == at else one for number, one in enumerate(rows)]
            broken = "".join(json.dumps(one) + "\n" for one in lines).encode()
        path.write_bytes(broken)
        try:
            with tally:
                use(folder, experiment, rng)
        except ConfigError:
            tally.add("refused")
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {kind}") from error
        tally.add("tables")
    assert tally.outcomes["refused"] > CASES // 4
    assert tally.outcomes["tables"] > CASES // 10
