"""The results page matches its files, and says where they were measured."""

import re

from docs_tools import tool
from page_blocks import ROOT

results = tool("results")


def test_the_page_is_up_to_date():
    found = results.read_all(results.RESULTS)
    assert results.PAGE.read_text(encoding="utf-8") == results.page(found, results.RESULTS), (
        "run: make results-page"
    )
    for result in found:
        written = (results.ASSETS / result.data).read_text(encoding="utf-8")
        assert written == result.csv, "run: make results-page"
        for plot in result.plots:
            copy = results.ASSETS / plot.name
            assert copy.read_bytes() == plot.read_bytes(), "run: make results-page"
    names = {name for r in found for name in (r.data, *(plot.name for plot in r.plots))}
    assert {path.name for path in results.ASSETS.iterdir()} == names


def test_the_page_can_be_read_to_its_end():
    assert len(results.PAGE.read_text(encoding="utf-8").split()) <= 10_000


def test_every_output_of_make_results_has_a_place_on_the_page():
    assert [*results.KNOWN] == [*results.COMMANDS, *results.OUTSIDE]
    page = results.PAGE.read_text(encoding="utf-8")
    for name, known in results.KNOWN.items():
        for path in re.findall(r"benchmarks/\S+\.(?:py|yaml)", results.COMMANDS.get(name, "")):
            assert (ROOT / path).is_file()
        assert f"{{ #{results.anchor(name)} }}" in page
        assert known.page is None or (ROOT / "docs" / known.page).is_file()
        for theme in ("light", "dark") if known.figure else ():
            assert (ROOT / f"docs/assets/figures/{known.figure}-{theme}.svg").is_file()
