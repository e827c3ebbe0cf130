"""The page of `make test-long`: outcomes and seconds per folder and per test marked `long`."""

import importlib.util
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """How the tests of this process compute: each way has its own lines."""
    # Its tests are a folder of that name, not a file.
    if getattr(importlib.util.find_spec("vllm"), "origin", None) is not None:
        return ", with vLLM"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ", interpreted"
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return ", oldest instructions"
    if os.environ.get("NUMBA_BOUNDSCHECK") == "1":
        return ", bounds checked"
    return ", with wrappers" if importlib.util.find_spec("peft") else ""


def runs_whole(config: pytest.Config) -> bool:
    """Whether all tests of the requested files are run."""
    given = config.option
    return not (given.keyword or given.collectonly or any("::" in word for word in config.args))


@dataclass
class Line:
    """Results of the tests of a folder, or of one test with all its cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1


class LongPage:
    """A pytest plugin that writes a folder's lines when its last test has run.

    So a run that is stopped leaves the lines of the folders that it completed.
    """

    def __init__(self, page: Path = PAGE) -> None:
        self._page = page
        self._folders: dict[str, dict[str, Line]] = defaultdict(lambda: defaultdict(Line))
        self._left: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = self._left or Counter(_folder(item.nodeid) for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        # Each process collects all tests; this one has none.
        self._left = self._left or Counter(map(_folder, ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder, test = _folder(report.nodeid), report.nodeid.partition("[")[0]
        for name in (folder, *([test] * ("long" in report.keywords))):
            self._folders[folder][name].add(report)
        if report.when == "teardown":
            self._left[folder] -= 1
            if self._left[folder] == 0:
                self._write(folder)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # A process that died has not reported all of its folder's tests.
        if exitstatus != pytest.ExitCode.INTERRUPTED:
            for folder in list(self._folders):
                self._write(folder)

    def _write(self, folder: str) -> None:
        lines = []
        for name, line in self._folders.pop(folder).items():
            outcomes = sorted(line.outcomes.items())
            said = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes)
            cells = (name + part(), said, f"{line.seconds:.0f}", machine(), commit())
            lines.append(f"| {' | '.join(cells)} |")
        replace_lines(self._page, HEAD, lines)


def _folder(nodeid: str) -> str:
    return str(Path(nodeid.partition("::")[0]).parent)
