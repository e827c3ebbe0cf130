"""The page in a real browser: it loads, its numbers are the result's, it fits and can be read."""

import re

import pytest

from gracekv.report import ReportData
from support.report_pages import ATTACK, classes, expected, shown_unit
from support.reports import long_report


def number(text):
    return int(text.replace(",", ""))


def test_loads_from_one_file_without_errors(opened):
    page = opened()
    assert page.problems == []
    assert [url.partition(":")[0] for url in page.asked] == ["file"]
    assert page.title() == "Grace, Snap – gracekv report"
    assert page.locator("h1").inner_text() == "Grace beside Snap"
    assert page.locator("#problem").is_hidden()


def test_numbers_are_the_accounting(page, pair):
    names = (
        "budget", "spent", "floor_spent", "recent", "bytes", "full_bytes", "metadata_bytes",
        "backend_bytes",
    )  # fmt: skip
    for name in names:
        cells = page.locator(f"#accounting td[data-field={name}]")
        for at, result in enumerate(pair.values()):
            assert number(cells.nth(at).text_content()) == getattr(result.accounting, name), name
    shown = page.locator("#accounting td[data-field=utility]").first.get_attribute("data-value")
    assert float(shown) == pair["Grace"].accounting.utility
    for at, result in enumerate(pair.values()):
        table = result.accounting.entries
        grid = page.locator("#maps [role=grid]").nth(at)
        for layer in range(table.shape[0]):
            for head in range(table.shape[1]):
                cell = grid.locator(f"[data-layer='{layer}'][data-head='{head}']")
                said = cell.get_attribute("aria-label")
                assert f"{int(table[layer, head])} entries" in said
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
    result = make(recipe, 3)
    data = ReportData.of({recipe: result})
    page = opened(data)
    assert page.problems == []
    assert classes(page, 0) == expected(data.columns[0], shown_unit(page, data), data.spans)
    assert page.locator("#auctionSection").is_visible() == (recipe != "fullkv")
    page.close()


def test_a_long_prompt_keeps_a_small_document(opened):
    data = long_report(32768, layers=8, heads=2, ratio=4)
    page = opened(data)
    most = 6000
    assert page.locator(".t[data-t]").count() < most
    page.fill("#query", "#16000")
    page.press("#query", "Enter")
    before = page.locator(".cursor").first.bounding_box()["y"]
    page.select_option("#right", label="nothing")
    # The reader stays about where he was: in the window, though lines are twice as long now.
    assert abs(page.locator(".cursor").first.bounding_box()["y"] - before) < 300
    for step in (0.25, 0.5, 1.0):
        page.evaluate(f"scrollTo(0, {step} * document.body.scrollHeight)")
        page.wait_for_timeout(100)
        assert 0 < page.locator(".t[data-t]").count() < most
    page.fill("#query", "#30000")
    page.press("#query", "Enter")
    cursor = page.locator(".cursor").first
    assert cursor.get_attribute("data-t") == "30000"
    box = cursor.bounding_box()
    assert 0 < box["y"] < 900
    page.locator("[name=mode][value=all]").check(force=True)
    assert page.locator(".t[data-t]").count() < most
    assert page.problems == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shades_can_be_read(opened, scheme):
    """Every shade's text has a contrast of 4.5 or more, as WCAG asks."""
    page = opened(color_scheme=scheme)
    measured = page.evaluate("""() => {
      const canvas = document.createElement("canvas").getContext("2d");
      const solid = (...layers) => {
        for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
      };
      const row = document.querySelector(".row");
      const pane = row.querySelector(".pane");
      const names = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "kept"];
      for (let i = 0; i < 9; i++) names.push("a" + i);
      return names.map((name) => {
        const word = document.createElement("span");
        word.className = "t " + name;
        pane.append(word);
        const style = getComputedStyle(word);
        const back = solid(getComputedStyle(row).backgroundColor, style.backgroundColor);
        const front = solid(style.color);
        word.remove();
        return [name, back, front];
      });
    }""")

    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for name, back, front in measured:
        high, low = sorted((luminance(back), luminance(front)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (scheme, name, back, front)
    page.close()


def test_fits_a_phone(opened, data):
    page = opened(viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#extra")
    assert page.locator("#leftChoice").is_visible()
    token = data.spans.context_start + 3
    page.locator(f".pane:nth-child(1) [data-t='{token}']").click()
    assert page.locator("#inspector").is_visible()
    page.click("#inspector .close")
    assert page.locator("#inspector").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
