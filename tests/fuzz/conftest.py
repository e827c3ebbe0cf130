import pytest

from support.fuzzing import Tally


@pytest.fixture
def tally(request, capsys):
    """A `Tally` that is printed when the test ends."""
    tally = Tally(request.node.name)
    yield tally
    with capsys.disabled():
        found = ", ".join(f"{count} {name}" for name, count in sorted(tally.outcomes.items()))
        print(f"\n{tally.name}: {found}; slowest {tally.slowest:.2f} s")
