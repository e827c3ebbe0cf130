"""The page of `make test-long`: each test replaces its own line, others stay."""

from support.fuzzing import Tally, write_line


def test_parts_replace_their_own_lines(tmp_path):
    page = tmp_path / "fuzz.md"
    page.write_text(
        "# Fuzz\n\n| what | cases | outcome | slowest |\n|---|---:|---|---:|\n| x | 1 |\n"
    )

    def write(name, outcomes):
        tally = Tally(name)
        for outcome in outcomes:
            tally.add(outcome)
        write_line(tally, page)

    write("test_rows", ["refused"])
    write("test_rows_again", ["tables"])
    write("test_rows", ["refused", "tables", "refused"])
    lines = page.read_text().splitlines()
    assert [line.split(" |")[:3] for line in lines if line.startswith("| rows")] == [
        ["| rows", " 3", " 2 refused, 1 tables"],
        ["| rows again", " 1", " 1 tables"],
    ]
    assert sum(line.startswith("| what |") for line in lines) == 1
    assert any(line.startswith("- machine: ") for line in lines)
    assert any(line.startswith("- commit: ") for line in lines)
