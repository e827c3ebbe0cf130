"""Reads tables from benchmarks/results for the figures of measurements."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Row = dict[str, str]


def table(name: str, *columns: str) -> list[Row]:
    """The first table of that result with all `columns`: one mapping per row, cells as written.

    Raises `LookupError` if there is none.
    """
    lines = (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[:-1]):
        header = _cells(line)
        if lines[number + 1].startswith("|--") and set(columns) <= set(header):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(header, _cells(row), strict=True)))
            return rows
    raise LookupError(f"{name}.md has no table with the columns {', '.join(columns)}.")


def number(cell: str) -> float:
    """1,024 or 3.66x or 76% as a number."""
    return float(cell.replace(",", "").rstrip("x%"))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
