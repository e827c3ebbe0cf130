"""The rows of `gpu.py`: appended as they are measured, and written out as a page."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import machine
import torch
import transformers
from decode_shapes import GEOMETRIES
from decode_steps import copy_speed

from gracekv.backends import Auto

Row = dict[str, Any]


class OutOfTime(Exception):
    """The deadline has passed; raised by an alarm, or before a row begins."""


class Rows:
    """Appends rows to a JSON-lines file.

    Args:
        path: the file.
        deadline: of `time.monotonic`; no row begins later.
        device: "cuda" or "cpu".

    Attributes:
        broken: whether the GPU refuses further work in this process.
        working: whether a row is being measured, which the deadline may interrupt.
    """

    def __init__(self, path: Path, deadline: float, device: str) -> None:
        self._path, self._deadline, self._device = path, deadline, device
        self.broken = self.working = False

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self._deadline - time.monotonic()

    def measure(self, part: str, labels: Row, work: Callable[[], Mapping[str, Any]]) -> Row:
        """Append `labels` and what `work` returns, with its status and seconds; returns the row.

        An error, too little memory and the deadline end the row, not the run.
        """
        row: Row = {"part": part, **labels}
        begin = time.perf_counter()
        try:
            if self.left <= 0 or self.broken:
                raise OutOfTime
            self.working = True
            row |= {"status": "ok", **work()}
            self.working = False
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
        except OutOfTime:
            row["status"] = "failed before" if self.broken else "out of time"
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            row["status"] = f"failed: {type(error).__name__}: {first[:200]}"
            self._check_device()
        finally:
            self.working = False
        row["row s"] = round(time.perf_counter() - begin, 2)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        if self._device == "cuda" and not self.broken:
            gc.collect()
            torch.cuda.empty_cache()
        return row

    def measure_all(self, part: str, work: Callable[[], None]) -> None:
        """Run a part, which measures rows; an error outside of them becomes a row too."""
        try:
            work()
        except (Exception, OutOfTime) as error:

            def again(error: BaseException = error) -> Row:
                raise error

            self.measure(part, {"what": "setting up"}, again)

    def _check_device(self) -> None:
        if self._device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self.broken = True


def header(options: argparse.Namespace) -> Row:
    """The machine, the versions, and the speed of a copy."""
    cuda = options.device == "cuda"
    found = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "machine": found.name if found else f"CPU, {machine.cores()}",
        "capability": f"{found.major}.{found.minor}" if found else "",
        "memory GiB": round(found.total_memory / 2**30, 1) if found else "",
        "copy GB/s": round(copy_speed(options.device, (1024 if cuda else 8) << 20) / 1e9, 1),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "transformers": transformers.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "commit": machine.commit(),
        "geometry": f"{options.geometry}: {GEOMETRIES[options.geometry]}",
        "weights": str(options.weights or "random, with scaled projections"),
        "backend": Auto().describe(options.device),
        "minutes": options.minutes,
    }


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return str(triton.__version__)


def page(rows: list[Row]) -> str:
    """The rows as Markdown: the machine, what failed, then a table a part."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    text = ["# One command on a GPU", "", "`python benchmarks/gpu.py`", ""]
    for row in parts.pop("machine", []):
        hidden = ("part", "status", "row s")
        text += [f"- {name}: {x}" for name, x in row.items() if x != "" and name not in hidden]
    measured = [row for part in parts.values() for row in part]
    other = [row for row in measured if row["status"] != "ok"]
    missed = [row for row in measured if "missed" in map(str, row.values())]
    text += [
        "",
        f"{len(measured)} rows; {len(other)} not measured or failed, {len(missed)} below a bar.",
        "",
    ]
    for part, own in parts.items():
        columns = list(dict.fromkeys(name for row in own for name in row if name != "part"))
        text += [f"## {part}", "", f"| {' | '.join(columns)} |", f"|{'--:|' * len(columns)}"]
        for row in own:
            cells = (_cell(row.get(name, "")) for name in columns)
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/")
