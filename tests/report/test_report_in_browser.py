"""The page in a real browser: it loads, its controls change it, its numbers are the result's."""

import dataclasses
import re

import pytest
import torch

from gracekv.report import ReportData, token_statuses
from gracekv.report.page import render
from support.reports import long_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

# Longest merged entry of each shade of the page.
BINS = (2, 4, 8, 16, 32, 64)
ATTACK = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="session")
def pair(make, words):
    special = {20: f" {ATTACK}", 25: " caf\u00e9", 26: "", 27: " 🙂"}
    return {
        "Grace": make("gracekv", 3, tokenizer=words(special), fields={"certify": True}, layers=3),
        "Snap": make("snapkv", 3, tokenizer=words(special), layers=3),
    }


@pytest.fixture(scope="session")
def data(pair):
    return ReportData.of(pair, {"Grace": f"an answer {ATTACK}"})


@pytest.fixture(scope="session")
def opened(browser, data, tmp_path_factory):
    """open(data, **context): a new page that is loaded; page.problems is what went wrong in it."""
    folder, contexts = tmp_path_factory.mktemp("pages"), {}

    def open_page(shown=data, **options):
        path = folder / f"{id(shown)}.html"
        if not path.exists():
            path.write_text(render(shown), encoding="utf-8")
        options = {"viewport": {"width": 1300, "height": 900}, **options}
        if str(options) not in contexts:
            contexts[str(options)] = browser.new_context(**options)
            contexts[str(options)].set_default_timeout(10_000)
        page = contexts[str(options)].new_page()
        page.problems, page.asked = [], []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        # The text is drawn when it comes near the window.
        page.locator("#textTitle").evaluate("title => title.scrollIntoView()")
        page.wait_for_selector(".pane")
        return page

    yield open_page
    for context in contexts.values():
        context.close()


@pytest.fixture
def page(opened):
    page = opened()
    yield page
    assert page.problems == []
    page.close()


def classes(page, pane):
    """{token: class names} of a pane, once all of a short prompt is drawn."""
    sync_api.expect(page.locator(".row:empty")).to_have_count(0)
    return page.eval_on_selector_all(
        f".pane:nth-child({pane + 1}) .t",
        "words => Object.fromEntries(words.map(w => [w.dataset.t, w.className]))",
    )


def shade(length):
    return length if length < 2 else 2 + sum(length > most for most in BINS)


def expected(column, unit, spans):
    """Class names of all tokens in one head, as the entries say."""
    entries = column.entries
    first, last = entries.region
    lengths_of = entries.entry_lengths()[unit].tolist()
    starts = set(entries.start[entries.offsets[unit] : entries.offsets[unit + 1]].tolist())
    slots = set() if column.slots is None else set(column.slots.tolist())
    names = {}
    for token in range(spans.length):
        if not first <= token < last:
            names[str(token)] = "t kept"
            continue
        length = lengths_of[token - first]
        begin = " begin" if length > 1 and token in starts else ""
        border = " slot" if token in slots else ""
        names[str(token)] = f"t n{shade(length)}{begin}{border}"
    return names


def slide(page, name, value):
    page.locator(f"#{name}").fill(str(value))


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
    names = {
        "budget": "budget", "spent": "spent", "floorSpent": "floor_spent", "recent": "recent",
        "bytes": "bytes", "fullBytes": "full_bytes", "metadataBytes": "metadata_bytes",
        "backendBytes": "backend_bytes",
    }  # fmt: skip
    for field, name in names.items():
        cells = page.locator(f"#accounting td[data-field={field}]")
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


def test_sliders_shade_the_text_by_their_head(page, data):
    heads = data.columns[0].entries.heads
    for layer, head in ((0, 0), (2, 1), (1, 0)):
        slide(page, "layer", layer)
        slide(page, "head", head)
        for pane, column in enumerate(data.columns):
            assert classes(page, pane) == expected(column, layer * heads + head, data.spans)
    assert page.locator("#layerShown").inner_text() == "1"
    page.uncheck("#slots")
    assert not any("slot" in name for name in classes(page, 0).values())


def test_averages_shade_by_entries_a_token(page, data):
    for mode, units in (("layer", slice(2, 4)), ("all", slice(0, 6))):
        slide(page, "layer", 1) if mode == "layer" else None
        page.locator(f"[name=mode][value={mode}]").check(force=True)
        for pane, column in enumerate(data.columns):
            lengths = column.entries.entry_lengths()[units].double()
            share = torch.where(lengths > 0, 1 / lengths.clamp(min=1), 0.0).mean(0)
            shown = classes(page, pane)
            first = column.entries.region[0]
            for at, value in enumerate(share.tolist()):
                step = int(re.search(r" a(\d)", shown[str(first + at)])[1])
                assert abs(step - 8 * value**0.5) <= 0.5 + 1e-4


def test_resolution_counts_what_is_shown(page, data):
    for mode, units in (("all", slice(0, 6)), ("head", slice(3, 4))):
        page.locator(f"[name=mode][value={mode}]").check(force=True)
        if mode == "head":
            slide(page, "layer", 1)
            slide(page, "head", 1)
        rows = page.locator("#resolution [data-bin]")
        for pane, column in enumerate(data.columns):
            lengths = column.entries.entry_lengths()[units].flatten().tolist()
            sums = {}
            for length in lengths:
                sums[shade(length)] = sums.get(shade(length), 0) + 1
            for at in range(rows.count()):
                row = rows.nth(at)
                shown = row.locator("td").nth(pane).get_attribute("data-tokens")
                assert int(shown) == sums.get(int(row.get_attribute("data-bin")), 0)
            total = sum(int(x) for x in rows.locator(f"td:nth-child({pane + 2})").evaluate_all(
                "cells => cells.map(cell => cell.dataset.tokens)"
            ))  # fmt: skip
            assert total == len(lengths)


def test_maps_choose_a_head_by_click_and_by_keys(page):
    page.locator("#maps [data-layer='2'][data-head='0']").first.click()
    assert page.locator("#layerShown").inner_text() == "2"
    assert page.locator("#headShown").inner_text() == "0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#layerShown").inner_text() == "1"
    assert page.locator("#headShown").inner_text() == "1"
    chosen = page.locator("#maps [role=grid]").first.locator("[aria-selected=true]")
    assert chosen.count() == 1
    assert chosen.get_attribute("aria-label").startswith("layer 1, head 1:")


def test_hover_tells_interval_multiplicity_and_relevance(page, pair, data):
    slide(page, "layer", 1)
    slide(page, "head", 0)
    statuses = {
        token: token_statuses(pair["Grace"], token).rows[2] for token in range(data.spans.length)
    }
    merged = next(t for t, status in statuses.items() if status.state == "merged" and "\n" not in
                  data.tokens[t] and data.tokens[t])  # fmt: skip
    status = statuses[merged]
    page.locator(f".pane:nth-child(1) [data-t='{merged}']").hover()
    tip = page.locator("#tip").inner_text()
    size = status.end - status.start
    assert f"merged with {size - 1} neighbour" in tip
    assert f"[{status.start}, {status.end})" in tip
    weight = float(re.search(rf"{size} tokens, weighs as ([\d.]+)", tip)[1])
    assert weight == pytest.approx(status.multiplicity, abs=0.5 * size / 255 + 0.006)
    worth = pair["Grace"]._run.relevance.scores[1, 0].double()
    shown = float(re.search(r"relevance\s+([\d.e+-]+) × the mean", tip)[1])
    assert shown == pytest.approx(status.relevance / float(worth.mean()), rel=0.06)
    first = data.spans.context_start
    share = float(worth[status.start - first : status.end - first].sum() / worth.sum()) * 100
    shown = float(re.search(r"entry's relevance\s+([\d.]+)%", tip)[1])
    assert shown == pytest.approx(share, rel=0.06, abs=0.006)
    gone = next(t for t in statuses if token_statuses(pair["Snap"], t).rows[2].state == "dropped"
                and data.tokens[t].strip())  # fmt: skip
    page.locator(f".pane:nth-child(2) [data-t='{gone}']").hover()
    assert "dropped" in page.locator("#tip").inner_text()


def test_a_chosen_token_shows_its_entry_in_every_head(page, pair, data):
    token = data.spans.context_start + 31
    page.locator(f".pane:nth-child(1) [data-t='{token}']").click()
    for at, result in enumerate(pair.values()):
        statuses = token_statuses(result, token)
        panel = page.locator("#inspector section").nth(at)
        counts = [f"{state} in {statuses.count(state)}" for state in ("exact", "merged", "dropped")]
        assert f"All layers and heads: {', '.join(counts)}." in panel.inner_text()
        assert panel.locator(".statuses i").count() == len(statuses)
        panel.locator("summary").click()
        rows = panel.locator("tbody tr")
        rows.nth(len(statuses) - 1).wait_for()
        for row, status in zip(rows.all_inner_texts(), statuses, strict=True):
            layer, head, state, entry, tokens, _, depth, _ = row.split("\t")
            assert (int(layer), int(head), state) == (status.layer, status.head, status.state)
            gone = status.state == "dropped"
            assert entry == ("–" if gone else f"[{status.start}, {status.end})")
            assert tokens == ("–" if gone else str(status.end - status.start))
            assert depth == ("–" if status.depth < 0 else str(status.depth))
    said = page.locator("#announce").text_content()
    assert f"token {token}. Grace: " in said
    assert f"in layer {page.locator('#layerShown').inner_text()}, head " in said
    page.locator("#inspector [data-unit='5']").first.click()
    assert page.locator("#layerShown").inner_text() == "2"
    assert page.locator("#headShown").inner_text() == "1"


def test_keys_move_in_the_text(page, data):
    page.locator("#words").focus()
    page.keyboard.press("ArrowRight")
    here = int(page.locator(".cursor").first.get_attribute("data-t"))
    for key, moved in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert page.locator(".cursor").first.get_attribute("data-t") == str(here + moved)
    page.keyboard.press("ArrowDown")
    below = int(page.locator(".cursor").first.get_attribute("data-t"))
    assert below > here + 1
    page.keyboard.press("ArrowUp")
    assert int(page.locator(".cursor").first.get_attribute("data-t")) <= here + 2
    slide(page, "layer", 0)
    slide(page, "head", 0)
    page.locator("#words").focus()
    page.keyboard.press("Shift+ArrowUp")
    page.keyboard.press("Shift+ArrowRight")
    assert page.locator("#layerShown").inner_text() == "1"
    assert page.locator("#headShown").inner_text() == "1"
    page.keyboard.press("Escape")
    assert page.locator(".cursor").count() == 0


def test_everything_is_reached_by_the_tab_key(page):
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(
            "(document.activeElement.id || document.activeElement.className)"
            " + (document.activeElement.value ?? '')"
        ))  # fmt: skip
    names = " ".join(reached)
    for control in ("skip", "head", "layer", "left", "right", "slots", "query", "cell", "words"):
        assert control in names, control


def test_search_finds_words_and_numbers(page, data):
    page.fill("#query", "#33")
    page.press("#query", "Enter")
    assert page.locator(".cursor").first.get_attribute("data-t") == "33"
    page.fill("#query", "WORD4")
    page.press("#query", "Enter")
    # Numbers from 40 on come first behind the cursor.
    assert page.locator(".cursor").first.get_attribute("data-t") == "40"
    assert re.fullmatch(r"\d+ of 11, token #40", page.locator("#found").inner_text())
    page.fill("#query", "word44 word45 word46")
    page.press("#query", "Enter")
    marked = page.locator(".pane:nth-child(1) .match")
    assert [m.get_attribute("data-t") for m in marked.all()] == ["44", "45", "46"]
    page.fill("#query", "nowhere")
    page.press("#query", "Enter")
    assert page.locator("#found").inner_text() == "not in the prompt"
    page.fill("#query", "#99999")
    page.press("#query", "Enter")
    assert f"#{data.spans.length - 1}" in page.locator("#found").inner_text()


def test_the_prompt_stays_text(page, data):
    classes(page, 0)
    assert page.evaluate("window.hacked") is None
    panes = page.locator(".pane:nth-child(1)").evaluate_all(
        "panes => panes.map(pane => pane.textContent).join('')"
    )
    assert panes == "".join(data.tokens)
    assert ATTACK in panes


def test_one_result_alone_and_the_other_side(opened, page, data):
    place = page.locator("#words").bounding_box()["y"]
    page.select_option("#right", label="nothing")
    assert page.locator(".row").first.locator(".pane").count() == 1
    assert abs(page.locator("#words").bounding_box()["y"] - place) < 200
    page.select_option("#left", label="Snap")
    assert page.locator("#names").inner_text() == "Snap"
    assert classes(page, 0) == expected(data.columns[1], shown_unit(page, data), data.spans)
    alone = opened(dataclasses.replace(data, columns=data.columns[:1]))
    assert alone.locator("#leftChoice").is_hidden()
    assert alone.locator(".row").first.locator(".pane").count() == 1
    assert alone.problems == []
    alone.close()


def shown_unit(page, data):
    layer, head = (int(page.locator(f"#{x}Shown").inner_text()) for x in ("layer", "head"))
    return layer * data.columns[0].entries.heads + head


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
