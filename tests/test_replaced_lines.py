"""Pages whose lines are replaced one by one keep all other lines."""

from support.results_page import replace_lines

HEAD = "# Title\n\n- {machine}, {commit}\n\n| tests | outcome |\n|---|---|\n"


def test_a_new_line_replaces_the_one_of_its_name_alone(tmp_path):
    page = tmp_path / "page.md"
    # A line may have the same name as its column.
    replace_lines(page, HEAD, ["| tests | 1 passed |", "| tests/fit | 2 passed |"])
    replace_lines(page, HEAD, ["| tests/fit | 3 passed |"])
    lines = page.read_text().splitlines()
    assert lines[-4:-2] == HEAD.splitlines()[-2:]
    assert lines[-2:] == ["| tests | 1 passed |", "| tests/fit | 3 passed |"]
