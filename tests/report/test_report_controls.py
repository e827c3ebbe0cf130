"""The page's controls in a real browser: sliders, modes, maps, hovering, keys and search."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from gracekv.report import ReportData, token_statuses
from support.report_pages import classes, expected, shown_unit, slide


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


def test_maps_choose_a_head_by_click_and_by_keys(page, data):
    page.locator("#maps [data-layer='2'][data-head='0']").first.click()
    assert shown_unit(page, data) == 2 * 2 + 0
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert shown_unit(page, data) == 1 * 2 + 1
    chosen = page.locator("#maps [role=grid]").first.locator("[aria-selected=true]")
    assert chosen.count() == 1
    assert chosen.get_attribute("aria-label").startswith("layer 1, head 1:")


def test_hover_tells_interval_multiplicity_and_relevance(page, pair, data):
    slide(page, "layer", 1)
    slide(page, "head", 0)

    def first_of(label, state):
        """The first token with visible text in that state, and its status."""
        for token in range(data.spans.context_start, data.spans.context_end):
            if data.tokens[token].strip() and "\n" not in data.tokens[token]:
                status = token_statuses(pair[label], token).rows[2]
                if status.state == state:
                    return token, status
        raise AssertionError(f"no token is {state} in {label}")

    merged, status = first_of("Grace", "merged")
    page.locator(f".pane:nth-child(1) [data-t='{merged}']").hover()
    tip = page.locator("#tip").inner_text()
    size = status.end - status.start
    assert f"merged with {size - 1} neighbour" in tip
    assert f"[{status.start}, {status.end})" in tip
    weight = float(re.search(rf"{size} tokens, weighs as ([\d.]+)", tip)[1])
    assert weight == pytest.approx(status.multiplicity, abs=0.5 * size / 255 + 0.006)
    scores = pair["Grace"].run.relevance.scores[1, 0].double()
    shown = float(re.search(r"relevance\s+([\d.e+-]+) × the mean", tip)[1])
    assert shown == pytest.approx(status.relevance / float(scores.mean()), rel=0.06)
    first = data.spans.context_start
    share = float(scores[status.start - first : status.end - first].sum() / scores.sum()) * 100
    shown = float(re.search(r"entry's relevance\s+([\d.]+)%", tip)[1])
    assert shown == pytest.approx(share, rel=0.06, abs=0.006)
    gone, _ = first_of("Snap", "dropped")
    page.locator(f".pane:nth-child(2) [data-t='{gone}']").hover()
    assert "dropped" in page.locator("#tip").inner_text()


def table(panel, statuses):
    """Open a token's table: the cells of each row, and the row's status."""
    panel.locator("summary").click()
    rows = panel.locator("tbody tr")
    rows.nth(len(statuses) - 1).wait_for()
    return zip((row.split("\t") for row in rows.all_inner_texts()), statuses, strict=True)


def test_a_chosen_token_shows_its_entry_in_every_head(page, pair, data):
    token = data.spans.context_start + 31
    page.locator(f".pane:nth-child(1) [data-t='{token}']").click()
    for at, result in enumerate(pair.values()):
        statuses = token_statuses(result, token)
        panel = page.locator("#inspector section").nth(at)
        counts = [f"{state} in {statuses.count(state)}" for state in ("exact", "merged", "dropped")]
        assert f"All layers and heads: {', '.join(counts)}." in panel.inner_text()
        assert panel.locator(".statuses i").count() == len(statuses)
        for (layer, head, state, entry, tokens, _, depth, _), status in table(panel, statuses):
            assert (int(layer), int(head), state) == (status.layer, status.head, status.state)
            gone = status.state == "dropped"
            assert entry == ("–" if gone else f"[{status.start}, {status.end})")
            assert tokens == ("–" if gone else str(status.end - status.start))
            assert depth == ("–" if status.depth < 0 else str(status.depth))
    said = page.locator("#announce").text_content()
    assert f"token {token}. Grace: " in said
    assert f"in layer {page.locator('#layerShown').inner_text()}, head " in said
    page.locator("#inspector [data-unit='5']").first.click()
    assert shown_unit(page, data) == 5
    # Tables that were opened stay open, and are the new token's.
    page.locator("#words").press("ArrowRight")
    rows = page.locator("#inspector section").first.locator("tbody tr")
    rows.first.wait_for()
    states = [row.split("\t")[2] for row in rows.all_inner_texts()]
    assert states == [status.state for status in token_statuses(pair["Grace"], token + 1)]
    # Keys go on in the text once the panel is closed.
    page.locator("#inspector .close").press("Enter")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".cursor").count() > 0


def test_keys_move_in_the_text(page, data):
    page.locator("#words").focus()
    page.keyboard.press("ArrowRight")
    here = int(page.locator(".cursor").first.get_attribute("data-t"))
    for key, moved in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert page.locator(".cursor").first.get_attribute("data-t") == str(here + moved)
    page.keyboard.press("ArrowDown")
    assert int(page.locator(".cursor").first.get_attribute("data-t")) > here + 1
    page.keyboard.press("ArrowUp")
    assert int(page.locator(".cursor").first.get_attribute("data-t")) <= here + 2
    slide(page, "layer", 0)
    slide(page, "head", 0)
    page.locator("#words").focus()
    page.keyboard.press("Shift+ArrowUp")
    page.keyboard.press("Shift+ArrowRight")
    assert shown_unit(page, data) == 1 * 2 + 1
    page.keyboard.press("Escape")
    assert page.locator(".cursor").count() == 0


def test_everything_is_reached_by_the_tab_key(page):
    focused = "(document.activeElement.id || document.activeElement.className)"
    focused += " + (document.activeElement.value ?? '')"
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    names = " ".join(reached)
    for control in ("skip", "head", "layer", "left", "right", "slots", "query", "cell", "words"):
        assert control in names, control


def test_search_finds_words_and_numbers(page, data):
    def search(text):
        page.fill("#query", text)
        page.press("#query", "Enter")
        return page.locator(".cursor").first.get_attribute("data-t")

    assert search("#33") == "33"
    # The search continues behind the cursor, so numbers from 40 on come first.
    assert search("WORD4") == "40"
    assert re.fullmatch(r"\d+ of 11, token #40", page.locator("#found").inner_text())
    search("word44 word45 word46")
    marked = page.locator(".pane:nth-child(1) .match")
    assert [m.get_attribute("data-t") for m in marked.all()] == ["44", "45", "46"]
    search("nowhere")
    assert page.locator("#found").inner_text() == "not in the prompt"
    assert page.locator(".match").count() == 0
    search("")
    assert page.locator("#found").inner_text() == ""
    search("#99999")
    assert f"#{data.spans.length - 1}" in page.locator("#found").inner_text()


def test_a_letter_whose_lower_case_is_longer_hides_no_match(opened, make, words):
    result = make("snapkv", 3, tokenizer=words({4: " İzmir", 7: " Alice", 9: " Alice"}))
    page = opened(ReportData.of({"a": result}))
    for count in (1, 2):
        page.fill("#query", "Alice")
        page.press("#query", "Enter")
        assert page.locator("#found").inner_text().startswith(f"{count} of 2")


def test_layers_are_numbered_as_in_the_model_and_all_is_printed(opened, make):
    result = make("snapkv", 3, context=2000)
    others = (SimpleNamespace(number=0, beside_entries=False),)
    cache = dataclasses.replace(result.run.cache, other_layers=others)
    result.run = dataclasses.replace(result.run, cache=cache)
    assert [row.layer for row in token_statuses(result, 9)] == [1, 1, 2, 2]
    page = opened(ReportData.of({"a": result}))
    slide(page, "layer", 1)
    assert page.locator("#scope").inner_text().startswith("layer 2, head")
    assert page.locator(".row:empty").count() > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".row:empty").count() == 0


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


def test_the_table_of_a_token_tells_how_far_values_moved(opened, make, words):
    fields = {"fit": "values_and_mass", "precision": {"name": "uniform", "bits": 4}}
    result = make("snapkv", 4, tokenizer=words(), fields=fields)
    page, spans = opened(ReportData.of({"Fitted": result})), result.prompt.spans
    tokens = range(spans.context_start, spans.context_end - 6)
    found = (token_statuses(result, token) for token in tokens)
    statuses = next(x for x in found if x.count("exact") > 1 and x.rows[0].value_change)
    page.locator(f".pane [data-t='{statuses.position}']").click()
    for cells, status in table(page.locator("#inspector section").first, statuses):
        if status.state == "dropped":
            assert cells[6] == cells[7] == "–"
            continue
        assert int(cells[6]) == status.bits
        assert float(cells[7].removesuffix(" %")) == pytest.approx(100 * status.value_change, abs=1)
        assert float(cells[5]) == pytest.approx(status.multiplicity, rel=0.03)
