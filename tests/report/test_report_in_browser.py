"""The page in a real browser: it loads, its numbers are the result's, it fits and can be read."""

import re

import pytest

from gracekv.report import ReportData
from support.report_pages import ATTACK, classes, expected, shown_unit


def test_loads_from_one_file(page):
    assert [url.partition(":")[0] for url in page.asked] == ["file"]
    assert page.title() == "Grace, Snap – gracekv report"
    assert page.locator("h1").inner_text() == "Grace beside Snap"
    assert page.locator("#problem").is_hidden()


def test_numbers_are_the_accounting(page, pair):
    names = "budget spent floor_spent recent bytes full_bytes metadata_bytes backend_bytes"
    for name in names.split():
        cells = page.locator(f"#accounting td[data-field={name}]")
        for at, result in enumerate(pair.values()):
            text = f"{getattr(result.accounting, name):,}"
            assert cells.nth(at).text_content() == text, name
    shown = page.locator("#accounting td[data-field=utility]").first.get_attribute("data-value")
    assert float(shown) == pair["Grace"].accounting.utility
    for at, result in enumerate(pair.values()):
        table = result.accounting.entries
        grid = page.locator("#maps [role=grid]").nth(at)
        for layer in range(table.shape[0]):
            for head in range(table.shape[1]):
                cell = grid.locator(f"[data-layer='{layer}'][data-head='{head}']")
                assert f"{int(table[layer, head])} entries" in cell.get_attribute("aria-label")
    card = page.locator(".card").first.inner_text()
    assert f"{pair['Grace'].accounting.spent} of " in card
    assert f"an answer {ATTACK}" in card


def test_the_prompt_stays_text(page, data):
    classes(page, 0)
    assert page.evaluate("window.hacked") is None
    panes = page.locator(".pane:nth-child(1)").evaluate_all(
        "panes => panes.map(pane => pane.textContent).join('')"
    )
    assert panes == "".join(data.tokens)
    assert ATTACK in panes


def test_curves_end_at_the_utility_and_show_the_bound(page, pair):
    figures = page.locator("#auction figure")
    assert figures.count() == 2
    kept = pair["Grace"].accounting
    said = figures.first.locator("figcaption").inner_text()
    shown = [float(x) for x in re.findall(r"(?:utility|bound is) ([\d.e+-]*\d)", said)]
    assert shown == pytest.approx([kept.utility, kept.bound], rel=0.01)
    assert figures.first.locator(".bound").count() == 1
    assert figures.nth(1).locator(".bound").count() == 0


@pytest.mark.parametrize("recipe", ["fullkv", "d2o", "chunkkv"])
def test_other_recipes_open_too(opened, make, recipe):
    data = ReportData.of({recipe: make(recipe, 3)})
    page = opened(data)
    assert classes(page, 0) == expected(data.columns[0], shown_unit(page, data), data.spans)
    assert page.locator("#auctionSection").is_visible() == (recipe != "fullkv")
