"""`benchmarks/memory.py` on made-up processes: medians, their spread, what is measured again."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("memory")
    monkeypatch.setattr(module.machine, "commit", lambda: "abc1234")
    return module


@pytest.fixture
def log(tmp_path):
    """Writes lines to a log and returns it; `figures` as (row, process, highest)."""

    def write(*figures, **other):
        path = tmp_path / "memory.jsonl"
        common = {
            "model": "smollm2", "length": 1024, "ratio": "8", "device": "cpu",
            "allocator": "default", "machine": "a CPU", "commit": "abc1234", "versions": "torch",
            "held": 1.0, "threads": 1,
        }  # fmt: skip
        with path.open("a") as file:
            for row, process, highest in figures:
                line = {**common, "row": row, "process": process, "highest": highest, **other}
                file.write(json.dumps(line) + "\n")
        return path

    return write


def table(memory, path):
    """Cells of the page's first table by row."""
    lines = memory.memory_model.report(memory.rows_in(path)).splitlines()
    rows = [line for line in lines if line.startswith("| smollm2 |")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]
    return {found[2]: found for found in cells}


def test_page_gives_the_median_and_what_single_processes_took(memory, log):
    path = log(
        ("prefill", 0, 400.0), ("prefill", 1, 900.0), ("prefill", 2, 500.0), ("snapkv", 0, 125.0)
    )
    cells = table(memory, path)
    assert cells["`prefill`"][3:5] == ["500 [400, 900]", "1.00"]
    assert cells["`prefill`"][-1] == "3"
    assert cells["`snapkv`"][3:5] == ["125", "0.25"]
    assert cells["`snapkv`"][-1] == "1"


def test_a_process_measured_again_counts_once_and_other_commits_not_at_all(memory, log):
    log(("prefill", 0, 900.0))
    log(("prefill", 1, 700.0), commit="before")
    path = log(("prefill", 0, 400.0))
    assert table(memory, path)["`prefill`"][3] == "400"


def test_a_process_that_failed_is_shown_and_leaves_the_others(memory, log):
    log(("prefill", 1, 0.0), status=137)
    path = log(("prefill", 0, 400.0))
    lines = memory.memory_model.report(memory.rows_in(path)).splitlines()
    assert any("| 400 | 1.00 |" in line for line in lines)
    assert any("failed, status 137" in line for line in lines)
