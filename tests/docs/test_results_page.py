"""The results page is what its files say, and says where they were measured."""

import importlib
import json
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


def test_sections_are_in_the_order_of_the_parts_and_what_is_outside_comes_last(results, measured):
    for name in ("gpu", "decode", "a-study", "smollm2-default"):
        folder = measured(name)
    found = results.read_all(folder)
    assert [x.name for x in found] == ["smollm2-default", "decode", "gpu", "a-study"]
    page = results.page(found)
    anchors = re.findall(r"^##+ .*\{ #(\S+) \}", page, re.MULTILINE)
    assert anchors == ["smollm2-default", "decode", "a-study", "outside", "gpu"]
    assert "### About gpu { #gpu }\n\nBy `make gpu`" in page
    assert "commit abc." in page


def test_what_is_not_measured_yet_has_a_section_that_says_so(results, measured):
    folder = measured("decode")
    page = results.page(results.read_all(folder), folder)
    assert "## answers { #answers }\n\n`gracekv evaluate --config " in page
    assert page.count("Not measured yet.") == len(results.COMMANDS) - 1
    assert "The run: " not in page


def test_the_page_tells_the_run_and_what_failed(results, measured):
    notes = ("machine: two cores, CPU; torch 2", "commit: abc")
    folder = measured(
        "decode", notes, body="**Failed**, so there are no figures: status 3: no room"
    )
    parts = {"decode": {"state": "failed", "minutes": 2.0, "load": 0.1, "why": "status 3: no room"},
             "memory": {"state": "done", "minutes": 5.0, "load": 0.1, "why": ""}}  # fmt: skip
    state = {"commit": "abc", "machine": "two cores", "versions": "torch 2", "parts": parts}
    (folder / "run.json").write_text(json.dumps(state))
    page = results.page(results.read_all(folder), folder)
    # What is told of the run is not told again.
    assert "    - machine: CPU\n" in page
    assert (
        f"7 minutes, 2 of {len(results.PARTS)} parts. Not whole: decode (status 3: no room)."
        in (page)
    )
    assert "\n\n**Failed**, so there are no figures: status 3: no room\n" in page


def test_a_section_shows_machine_commit_and_tables(results, measured):
    notes = ("machine: two cores; torch", "commit: abc", f"config: {'word ' * 60}")
    page = results.page(results.read_all(measured("a-study", notes)))
    assert "## About a-study { #a-study }" in page
    assert "    - machine: two cores; torch" in page
    assert TABLE in page
    assert "config:" not in page


def test_headings_go_down_and_output_is_in_the_data(results, measured):
    body = f"{TABLE}\n## Profile\n\n```\n# name  time\n```\n\n## More\n\n{TABLE}"
    [result] = results.read_all(measured("a-study", body=body))
    page = results.page([result])
    assert "### Profile\n\n[A profile](assets/results/a-study.csv)." in page
    assert f"### More\n\n{TABLE}" in page
    assert re.findall(r"^## .*", page, re.MULTILINE) == ["## About a-study { #a-study }"]
    assert "# # name  time\n" in result.csv


def test_tables_that_another_page_has_are_in_the_data(results, measured):
    [result] = results.read_all(measured("decode-bits"))
    page = results.page([result])
    assert (
        "[All tables](assets/results/decode-bits.csv), [what they mean](stages/backends.md)" in page
    )
    assert TABLE not in page
    assert "About decode-bits,1,2\n" in result.csv


def test_long_tables_and_those_of_single_tasks_are_in_the_data(results, measured):
    long = TABLE + "| 3 | 4 |\n" * 19 + "| 1,024 | 4 |\n"
    single = "| method | 8x |\n|---|--:|\n| **a** | <u>-1</u> [-2, `0`] |\n"
    body = f"## All\n\n{long}\n## Tasks\n\n### A task\n\nOf 3 samples.\n\n{single}"
    [result] = results.read_all(measured("a-study", body=body))
    page = results.page([result])
    assert "### All\n\n[A table of 21 rows](assets/results/a-study.csv)." in page
    assert "| 3 | 4 |" not in page
    assert "task" not in page.partition("## About")[2].lower()
    lines = result.csv.splitlines()
    assert lines[:3] == ["# About a-study", "# machine: two cores; torch", "# commit: abc"]
    assert lines[3] == "table,tokens,s,method,8x"
    assert lines.count("All,3,4,,") == 19
    assert "All,1024,4,," in lines
    assert lines[-2:] == ["# Of 3 samples.", 'A task,,,a,"-1 [-2, 0]"']


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


def test_columns_of_one_name_are_refused(results, measured):
    body = "| s | ratio | MiB | ratio |\n|--:|--:|--:|--:|\n| 1 | 2 | 3 | 4 |\n"
    (found,) = results.read_all(measured("extend", body=body))
    with pytest.raises(ValueError, match="two columns named ratio"):
        _ = found.csv


def test_a_result_without_title_is_refused(results, tmp_path):
    (tmp_path / "x.md").write_text(TABLE)
    with pytest.raises(results.ResultError, match="title"):
        results.read_all(tmp_path)
