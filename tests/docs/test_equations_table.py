"""Every equation's code is where docs/how-it-works.md says, and cites the equation's number."""

import re

import pytest
from page_blocks import ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").partition("## Equations")[2]
ROWS = [
    (number, name, part[1], re.findall(r"`(\w+)`", cell))
    for part in re.finditer(r"\(`gracekv/(\w+)`\)(.*?)(?=\n\*\*|\Z)", PAGE, re.DOTALL)
    for number, cell in re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]+) \|$", part[2], re.MULTILINE)
    for name in re.findall(r"`([\w/]+\.py)`", cell)
]


def cited(text):
    """Equation numbers in docstrings and comments, ranges such as "(S8) to (S11)" included."""
    found = set(re.findall(r"\(([A-Z]\d+)\)", text))
    for letter, first, last in re.findall(r"\(([A-Z])(\d+)\)\s+to\s+\(?[A-Z](\d+)\)", text):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_all_stages_are_read():
    assert {stage for _, _, stage, _ in ROWS} == {"segment", "value", "tree", "allocate"}
    assert len(ROWS) > 25


@pytest.mark.parametrize(("number", "name", "stage", "defined"), ROWS)
def test_code_is_where_the_table_says(number, name, stage, defined):
    package = ROOT / "gracekv"
    places = [p for p in (package / stage / name, package / name) if p.is_file()]
    assert places, f"{number}: there is no gracekv/{stage}/{name}"
    text = places[0].read_text(encoding="utf-8")
    assert number in cited(text), f"{name} does not cite {number}"
    for x in defined:
        found = re.search(rf'^(?:def|class) {x}\b.*?"""(.*?)"""', text, re.DOTALL | re.MULTILINE)
        assert number in cited(found[1] if found else ""), f"{name}: {x} does not cite {number}"
