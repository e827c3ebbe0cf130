"""The prompt strings of both benchmarks, read from the package's data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def ruler() -> Mapping[str, Any]:
    """RULER: the needle and noise lines, and under "tasks" one entry per task."""
    data: Mapping[str, Any] = _read("ruler.json")
    return data


@cache
def longbench() -> Mapping[str, Any]:
    """LongBench: one entry per data set."""
    data: Mapping[str, Any] = _read("longbench.json")["datasets"]
    return data


def _read(name: str) -> Any:
    return json.loads((files("gracekv.evaluate") / "data" / name).read_text(encoding="utf-8"))
