"""Pages of two results in a real browser, and the expected classes of their words."""

import pytest
import torch

from gracekv.report import ReportData
from gracekv.report.page import render

# Longest merged entry for each shade on the page.
BINS = (2, 4, 8, 16, 32, 64)


ATTACK = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="session")
def pair(make, words):
    special = {0: "\ufeff word0", 20: f" {ATTACK}", 25: " caf\u00e9", 26: "", 27: " 🙂"}
    return {
        "Grace": make("gracekv", 3, tokenizer=words(special), fields={"certify": True}, layers=3),
        "Snap": make("snapkv", 3, tokenizer=words(special), layers=3),
    }


@pytest.fixture(scope="session")
def data(pair):
    return ReportData.of(pair, {"Grace": f"an answer {ATTACK}"})


@pytest.fixture(scope="session")
def open_page(browser, data, tmp_path_factory):
    """open_page(data): a new, loaded page; page.problems lists what went wrong in it."""
    folder, kept = tmp_path_factory.mktemp("pages"), {}
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    context.set_default_timeout(10_000)

    def open_page(shown=data):
        # Another report may get the id of one that was freed.
        path = folder / f"{id(kept.setdefault(id(shown), shown))}.html"
        if not path.exists():
            path.write_text(render(shown), encoding="utf-8")
        page = context.new_page()
        page.problems, page.asked = [], []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        # The text is drawn when it is scrolled near the window.
        page.locator("#textTitle").evaluate("title => title.scrollIntoView()")
        page.wait_for_selector(".pane")
        return page

    yield open_page
    context.close()


@pytest.fixture
def opened(open_page):
    """Opens pages for one test, and checks afterwards that nothing went wrong in them."""
    pages = []
    yield lambda *shown: pages.append(open_page(*shown)) or pages[-1]
    for page in pages:
        assert page.problems == []
        page.close()


@pytest.fixture
def page(opened):
    return opened()


def classes(page, pane):
    """{token: class names} of a pane, once a short prompt is fully drawn."""
    from playwright.sync_api import expect

    expect(page.locator(".row:empty")).to_have_count(0)
    return page.eval_on_selector_all(
        f".pane:nth-child({pane + 1}) .t",
        "words => Object.fromEntries(words.map(w => [w.dataset.t, w.className]))",
    )


def shade(length):
    return length if length < 2 else 2 + sum(length > most for most in BINS)


def entry_lengths(entries):
    """int64 [L*G, W]: the length of each token's entry, 0 where the token is dropped."""
    first, last = entries.region
    lengths = torch.zeros(len(entries.offsets) - 1, last - first, dtype=torch.int64)
    for unit, start, end in zip(entries.head_of_entry(), entries.start, entries.end, strict=True):
        lengths[unit, start - first : end - first] = end - start
    return lengths


def expected(column, unit, spans):
    """Class names of all tokens in one head, according to the entries."""
    entries = column.entries
    first, last = entries.region
    lengths_of = entry_lengths(entries)[unit].tolist()
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


def shown_unit(page, data):
    layer, head = (int(page.locator(f"#{x}Shown").inner_text()) for x in ("layer", "head"))
    return layer * data.columns[0].entries.heads + head
