"""The page says of fitted entries how far their values moved, as `token_statuses` does."""

import pytest

from gracekv.report import ReportData, token_statuses
from gracekv.report.page import render

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


def test_the_table_of_a_token_tells_how_far_values_moved(browser, make, words, tmp_path):
    result = make("snapkv", 2, tokenizer=words(), fields={"fit": "values_and_mass"})
    path = tmp_path / "page.html"
    path.write_text(render(ReportData.of({"Fitted": result})), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(10_000)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.locator("#textTitle").evaluate("title => title.scrollIntoView()")
    spans = result.prompt.spans
    token, statuses = next(
        (token, found)
        for token in range(spans.context_start, spans.context_end - 6)
        if (found := token_statuses(result, token)).count("exact") > 1
        and found.rows[0].value_change
    )
    page.locator(f".pane [data-t='{token}']").click()
    panel = page.locator("#inspector section").first
    panel.locator("summary").click()
    rows = panel.locator("tbody tr")
    rows.nth(len(statuses) - 1).wait_for()
    moved = 0
    for row, status in zip(rows.all_inner_texts(), statuses, strict=True):
        cells = row.split("\t")
        if status.state == "dropped":
            assert cells[6] == "–"
            continue
        moved += status.value_change > 0
        assert float(cells[6].removesuffix(" %")) == pytest.approx(100 * status.value_change, abs=1)
        assert float(cells[5]) == pytest.approx(status.multiplicity, rel=0.03)
    assert moved
    page.close()
