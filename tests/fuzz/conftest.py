import pytest

from support.covering import LONG
from support.fuzzing import Tally, write_line


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


@pytest.fixture
def tally(request, capsys):
    """A `Tally` that is printed when the test ends, and recorded if the test passed."""
    tally = Tally(request.node.name)
    yield tally
    with capsys.disabled():
        print(f"\n{tally.name}: {tally.counts()}; slowest {tally.slowest:.2f} s")
    if LONG and getattr(request.node, "passed", False):
        write_line(tally)
