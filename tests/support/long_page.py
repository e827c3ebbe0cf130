"""The page of `make test-long`: outcomes and seconds, by folder and of each test marked `long`."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from support.results_page import RESULTS, commit, machine, replace_lines

PAGE = RESULTS / "test-long.md"
HEAD = """# What `make test` leaves to `make test-long`

- machine: {machine}
- commit: {commit}
- `make test-long` runs every test with every case and ten times as many random examples: folder by
  folder here. A test with a line of its own is marked `long` and runs nowhere else. Each run
  replaces its own lines.

| tests | outcome | seconds | machine | commit |
|---|---|---:|---|---|
"""


def part() -> str:
    """How the tests of this process compute: each way has lines of its own."""
    # Its tests are a folder of that name, which has no file of its own.
    if getattr(importlib.util.find_spec("vllm"), "origin", None) is not None:
        return ", with vLLM"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ", interpreted"
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return ", oldest instructions"
    return ""


class LongPage:
    """A plugin of pytest that writes the lines of a whole run; a part of a file writes none."""

    def __init__(self, page: Path = PAGE) -> None:
        self._page = page
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, test = report.nodeid.partition("::")
        for name in [str(Path(path).parent), *([f"{path}::{test}"] * ("long" in report.keywords))]:
            name = name.partition("[")[0] + part()
            self._seconds[name] += report.duration
            if report.when == "call" or report.outcome != "passed":
                self._outcomes[name][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        given = session.config.option
        if given.keyword or any("::" in word for word in session.config.args):
            return
        lines = []
        for name, outcomes in self._outcomes.items():
            said = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
            cells = (name, said, f"{self._seconds[name]:.0f}", machine(), commit())
            lines.append(f"| {' | '.join(cells)} |")
        replace_lines(self._page, HEAD, lines)
