"""The results page is what its files say, and says where they were measured."""

import importlib
import re

import pytest
from page_blocks import ROOT

TABLE = "| tokens | s |\n|--:|--:|\n| 1 | 2 |\n"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    return importlib.import_module("results")


@pytest.fixture
def measured(tmp_path):
    """A folder of results, and a function that adds one."""

    def add(name, notes=("machine: two cores; torch", "commit: abc"), body=TABLE):
        listed = "".join(f"- {note}\n" for note in notes)
        (tmp_path / f"{name}.md").write_text(f"# About {name}\n\n{listed}\n{body}")
        return tmp_path

    return add


def test_the_page_is_up_to_date(results):
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


def test_the_page_can_be_read_to_its_end(results):
    assert len(results.PAGE.read_text(encoding="utf-8").split()) <= 10_000


def test_every_output_of_make_results_has_a_place_on_the_page(results):
    assert [*results.KNOWN] == [*results.COMMANDS, *results.OUTSIDE]
    page = results.PAGE.read_text(encoding="utf-8")
    for name, known in results.KNOWN.items():
        for path in re.findall(r"benchmarks/\S+\.(?:py|yaml)", results.COMMANDS.get(name, "")):
            assert (ROOT / path).is_file()
        assert f"{{ #{results.anchor(name)} }}" in page
        assert known.page is None or (ROOT / "docs" / known.page).is_file()
        for theme in ("light", "dark") if known.figure else ():
            assert (ROOT / f"docs/assets/figures/{known.figure}-{theme}.svg").is_file()


def test_what_is_not_measured_yet_has_a_section_that_says_so(results, measured):
    folder = measured("decode")
    page = results.page(results.read_all(folder), folder)
    assert "## answers { #answers }\n\n`gracekv evaluate --config " in page
    assert page.count("Not measured yet.") == len(results.COMMANDS) - 1
    assert "The run: " not in page


@pytest.mark.parametrize(
    ("notes", "missing"),
    [(("machine: a",), "commit"), (("commit: a",), "machine"), ((), "machine")],
)
def test_a_result_that_hides_where_it_was_measured_is_refused(results, measured, notes, missing):
    folder = measured("a-study", notes=notes)
    with pytest.raises(results.ResultError, match=f"Add '- {missing}: "):
        results.read_all(folder)
