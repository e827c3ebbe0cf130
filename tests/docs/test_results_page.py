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
    assert results.PAGE.read_text(encoding="utf-8") == results.page(found), "run: make results-page"
    for plot in (plot for result in found for plot in result.plots):
        copy = results.PLOTS / plot.name
        assert copy.read_bytes() == plot.read_bytes(), "run: make results-page"


def test_every_known_command_exists(results):
    for known in results.KNOWN.values():
        for path in re.findall(r"benchmarks/\S+", known.command):
            assert (ROOT / path).is_file()
        assert known.page is None or (ROOT / "docs" / known.page).is_file()
        for theme in ("light", "dark") if known.figure else ():
            assert (ROOT / f"docs/assets/figures/{known.figure}-{theme}.svg").is_file()


def test_evaluations_come_first_and_timings_last(results, measured):
    for name in ("decode", "a-study", "smollm2"):
        folder = measured(name)
    assert [result.name for result in results.read_all(folder)] == ["smollm2", "a-study", "decode"]


def test_a_section_shows_machine_commit_and_tables(results, measured):
    page = results.page(results.read_all(measured("a-study")))
    assert "| [About a-study](#a-study) | two cores | `abc` |" in page
    assert "## About a-study { #a-study }" in page
    assert "    - machine: two cores; torch" in page
    assert TABLE in page


def test_headings_go_down_and_output_is_folded(results, measured):
    body = f"{TABLE}\n## Profile\n\n```\nname  time\n```\n\n## More\n\n### Deep\n\n{TABLE}"
    page = results.page(results.read_all(measured("a-study", body=body)))
    assert '??? note "Profile"\n\n    ```text\n    name  time\n    ```' in page
    assert "### More" in page
    assert re.findall(r"^## .*", page, re.MULTILINE) == ["## About a-study { #a-study }"]


def test_tables_with_a_page_of_their_own_are_folded(results, measured):
    page = results.page(results.read_all(measured("allocation_quality")))
    assert "(allocation.md)" in page
    assert '??? note "All tables"\n\n    | tokens | s |' in page


def test_a_plot_belongs_to_the_longest_name(results, measured):
    measured("smollm2")
    folder = measured("smollm2-length", body=f"![plot](smollm2-length.png)\n\n{TABLE}")
    for name in ("smollm2.png", "smollm2-length.png"):
        (folder / name).write_bytes(b"png")
    found = results.read_all(folder)
    assert {r.name: [p.name for p in r.plots] for r in found} == {
        "smollm2": ["smollm2.png"],
        "smollm2-length": ["smollm2-length.png"],
    }
    page = results.page(found)
    assert page.count("smollm2-length.png") == 1
    assert "(assets/results/smollm2-length.png)" in page


@pytest.mark.parametrize(
    ("notes", "missing"),
    [(("machine: a",), "commit"), (("commit: a",), "machine"), ((), "machine")],
)
def test_a_result_that_hides_where_it_was_measured_is_refused(results, measured, notes, missing):
    folder = measured("a-study", notes=notes)
    with pytest.raises(results.ResultError, match=f"Add '- {missing}: "):
        results.read_all(folder)


def test_a_result_without_title_is_refused(results, tmp_path):
    (tmp_path / "x.md").write_text(TABLE)
    with pytest.raises(results.ResultError, match="title"):
        results.read_all(tmp_path)
