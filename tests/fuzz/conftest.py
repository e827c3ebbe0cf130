import pytest

from support.covering import LONG
from support.fuzzing import Tally, write_line


@pytest.fixture
def tally(request, capsys):
    """A `Tally` that is printed when the test ends, and recorded if the test passed."""
    tally, failed = Tally(request.node.name), request.session.testsfailed
    yield tally
    with capsys.disabled():
        print(f"\n{tally.name}: {tally.counts()}; slowest {tally.slowest:.2f} s")
    if LONG and request.session.testsfailed == failed:
        write_line(tally)
