"""The table of supported models matches the tests."""

from page_blocks import ROOT

from support.families import table
from support.tried_families import sentence


def test_the_table_is_made_of_the_tests_list():
    page = (ROOT / "docs" / "models.md").read_text()
    written = page.split("<!-- families -->")[1].split("<!-- end -->")[0].strip()
    assert written == table(), f"docs/models.md should hold:\n{table()}"


def test_the_tried_families_are_those_of_the_tests():
    assert sentence() in (ROOT / "docs" / "models.md").read_text(), sentence()
