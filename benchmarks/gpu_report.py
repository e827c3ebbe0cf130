"""The rows of `gpu.py`: an append-only log, and the page that is written from it."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
import transformers
from decode_shapes import GEOMETRIES

from gracekv.backends import Auto

Row = dict[str, Any]
BEGUN = "begun"


class OutOfTime(Exception):
    """The time limit has passed; raised by an alarm."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row to measure.

    Attributes:
        labels: identify the row within its part.
        work: measures it and returns the other columns.
        seconds: a generous estimate of its duration on an H100, until a log has a measured one.
    """

    labels: Row
    work: Callable[[], Row]
    seconds: float
    part: str = ""


class Log:
    """Rows in an append-only JSON-lines file, so that a run resumes where another ended.

    A row counts if its run had the same header: code, machine and options. The commit's name does
    not count, since the digest of the code says more.

    Args:
        path: the file.
        header: describes the run.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self._path, self._header = path, header
        own = {name: value for name, value in header.items() if name != "commit"}
        self._run = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:12]
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):  # the process was killed while writing this line
            self._write("\n")
        self._rows: list[Row] = []
        for line in text.splitlines():
            try:
                self._rows.append(json.loads(line))
            except ValueError:
                continue

    def append(self, case: Case, found: Row) -> None:
        row = {"run": self._run, "part": case.part, "labels": case.labels, **found}
        self._write(json.dumps(row) + "\n")
        self._rows.append(row)

    def outcome(self, case: Case) -> Row | None:
        """The row's columns if nothing remains to be measured, else None.

        A row that two runs started but did not finish is not tried a third time.
        """
        own = [row for row in self._named(case) if row["run"] == self._run]
        for row in own:
            if row["status"] != BEGUN:
                return {**case.labels, **_columns(row)}
        return {**case.labels, "status": "cut off twice"} if len(own) > 1 else None

    def expected(self, case: Case) -> float:
        """Expected seconds of the row: as last time, at any commit, plus a fifth."""
        known = [row["row s"] for row in self._named(case) if "row s" in row]
        return 1.2 * known[-1] if known else case.seconds

    def page(self, cases: list[Case]) -> str:
        """The results as Markdown: a table for each part, and the missing rows."""
        parts: dict[str, list[Row]] = {}
        missing: dict[str, list[str]] = {}
        for case in cases:
            row = self.outcome(case)
            if row is None:
                name = " ".join(_cell(label) for label in case.labels.values())
                missing.setdefault(case.part, []).append(name)
            else:
                parts.setdefault(case.part, []).append(row)
        rows = [row for part in parts.values() for row in part]
        failed = sum(row["status"] != "ok" for row in rows)
        missed = sum("missed" in map(str, row.values()) for row in rows)
        text = ["# One command on a GPU", "", "`python benchmarks/gpu.py`", ""]
        text += [f"- {name}: {value}" for name, value in self._header.items() if value != ""]
        text += [
            "",
            f"{len(rows)} of {len(cases)} rows; {failed} not ok, {missed} below a bar.",
            "",
        ]
        if missing:
            text += ["Not measured yet; the same command goes on with it:", ""]
            text += [f"- {part}: {', '.join(names)}" for part, names in missing.items()]
            text.append("")
        for part, own in parts.items():
            columns = list(dict.fromkeys(name for row in own for name in row))
            text += [f"## {part}", "", f"| {' | '.join(columns)} |", f"|{'--:|' * len(columns)}"]
            for row in own:
                text.append(f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |")
            text.append("")
        return "\n".join(text)

    def _named(self, case: Case) -> list[Row]:
        # Labels as they are read back from the file.
        labels = json.loads(json.dumps(case.labels))
        return [row for row in self._rows if row["part"] == case.part and row["labels"] == labels]

    def _write(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:  # one system call appends all of it
            file.write(text.encode())
            os.fsync(file.fileno())


def header(options: argparse.Namespace) -> Row:
    """The machine, the versions, the code, and the options that change figures."""
    cuda = options.device == "cuda"
    found = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "machine": found.name if found else f"CPU, {machine.cores()}",
        "capability": f"{found.major}.{found.minor}" if found else "",
        "memory GiB": round(found.total_memory / 2**30, 1) if found else "",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "transformers": transformers.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "commit": machine.commit() or "unknown, there was no git",
        "code": machine.digest(),
        "geometry": f"{options.geometry}: {GEOMETRIES[options.geometry]}",
        "weights": str(options.weights or "random, with scaled projections"),
        "backend": Auto().describe(options.device),
        "ratio": options.ratio,
    }


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return str(triton.__version__)


def _columns(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("run", "part", "labels")}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/")
