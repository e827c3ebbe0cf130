"""The built site: no warning, no broken link, nothing from the network, and it fits a phone."""

import importlib
import json
import logging
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from urllib.parse import unquote, urlsplit

import pytest
from built_page import BuiltPage
from docs_tools import tool
from page_blocks import ROOT, pages
from public_names import PACKAGE, exported

from gracekv.pipeline.composition import REGISTRIES
from support.covering import LONG

# Sites that pages may link to; the links are not followed here.
ELSEWHERE = {
    "arxiv.org", "github.com", "docs.python.org", "docs.vllm.ai", "huggingface.co",
    "keepachangelog.com", "semver.org",
    "squidfunk.github.io",  # the theme's own mark
}  # fmt: skip
# The version, and RULER's generator, which `run` calls; its tasks are in the guide.
WITHOUT_A_PLACE = {"gracekv.__version__", "gracekv.registry.suggestion"}
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = {"light": "default", "dark": "slate"}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Folder of the site, built as by `make docs`; a warning fails."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    out = tmp_path_factory.mktemp("site")
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("mkdocs")
    log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out), strict=False)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    log.removeHandler(handler)
    assert not said
    return out


@pytest.fixture(scope="session")
def built(site):
    """{path inside the site: page}."""
    return {p.relative_to(site).as_posix(): BuiltPage(p) for p in sorted(site.rglob("*.html"))}


def test_every_page_is_built(built):
    written = {p.relative_to(ROOT / "docs") for p in pages() if p.is_relative_to(ROOT / "docs")}
    assert {p.with_suffix(".html").as_posix() for p in written} <= set(built)
    assert "changelog.html" in built


def test_links_lead_somewhere(site, built):
    broken = []
    for name, page in built.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.hostname not in ELSEWHERE:
                    broken.append(f"{name}: {link} leads to an unknown site")
                continue
            # The 404 page has links from the root.
            target = site / name if not parts.path else (site / name).parent / unquote(parts.path)
            if parts.path.startswith("/"):
                target = site / parts.path[1:]
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target.suffix == ".html":
                known = built[target.resolve().relative_to(site.resolve()).as_posix()].ids
                if unquote(parts.fragment) not in known:
                    broken.append(f"{name}: {link} has no such place")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site, built):
    for name, page in built.items():
        assert not [x for x in page.loads if urlsplit(x).netloc], name
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"url\(\s*['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8"))
        assert not [x for x in urls if urlsplit(x).netloc], sheet


def test_equations_are_rendered(built):
    assert not {name: page.raw for name, page in built.items() if page.raw}
    for source in pages():
        if source.is_relative_to(ROOT / "docs"):
            name = source.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
            text = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text(), flags=re.DOTALL)
            assert built[name].equations == len(re.findall(r"\\\(|\\\[", text)), name


def test_every_strategy_has_its_place(built):
    for stage, registry in REGISTRIES.items():
        page = tool("strategy_tables").PAGES[stage].replace(".md", ".html")
        for name in registry:
            cls = registry.get(name)
            home = tool("strategy_tables").public_module(cls)
            assert f"{home}.{cls.__qualname__}" in built[page].ids


def test_every_stage_says_what_a_strategy_of_it_defines():
    text = (ROOT / "docs" / "add-a-strategy.md").read_text(encoding="utf-8")
    for stage, registry in REGISTRIES.items():
        name, told = re.search(rf"\n\| \[{stage}\]\S+ \| `(\w+)` \|(.*)\|\n", text).groups()
        base = getattr(importlib.import_module(registry._base.__module__), name)
        assert all(x.replace("__call__", "`(") in told for x in base.__abstractmethods__), stage
        assert all(hasattr(base, x) for x in re.findall(r"`(\w+)", told)), stage


def test_every_exported_name_has_its_place(built):
    ids = set().union(*(page.ids for page in built.values()))
    places, found = [], []
    for path in sorted(PACKAGE.rglob("__init__.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        for name in exported(path):
            made = getattr(importlib.import_module(module), name)
            # A name that several packages export needs only one place.
            found += [made] if f"{module}.{name}" in ids else []
            places.append((f"{module}.{name}", made))
    lost = [place for place, made in places if not any(made is x for x in found)]
    assert set(lost) <= WITHOUT_A_PLACE


@pytest.fixture(scope="module")
def server(site):
    """Local address of the site, and the requests that it could not answer."""
    refused = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send_error(self, *args, **options):
            refused.append(self.path)
            super().send_error(*args, **options)

    serving = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", refused
    serving.shutdown()


LOOK = """() => {
    const flat = [...document.querySelectorAll("math")].filter(
        x => x.checkVisibility() && x.getBoundingClientRect().height < 4);
    const broken = [...document.images].filter(x => x.complete && !x.naturalWidth);
    // On a phone equations scroll in boxes of their own.
    const long = [...document.querySelectorAll(".equation")].filter(
        x => window.innerWidth > 1000 && x.scrollWidth > x.clientWidth);
    return {
        wide: document.scrollingElement.scrollWidth - window.innerWidth,
        flat: [...flat, ...long.flatMap(x => [...x.children])].map(x => x.getAttribute("alttext")),
        broken: broken.map(x => x.src),
    };
}"""


@pytest.fixture
def tab(browser):
    with browser.new_page() as tab:
        tab.set_default_timeout(120_000)
        yield tab


def test_pages_in_a_browser(tab, server, site, built):
    address, refused = server
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    faults, place = [], ""
    tab.on("console", lambda m: m.type in ("error", "warning") and faults.append((place, m.text)))
    tab.on("pageerror", lambda error: faults.append((place, str(error))))
    tab.on("request", lambda r: r.url.startswith(address) or faults.append((place, r.url)))
    # Otherwise every page would index a megabyte for its search, which the next test covers.
    tab.route("**/search_index.json", lambda route: route.fulfill(json=index | {"docs": []}))
    names = sorted(built.keys() - {"404.html"})
    # The long run checks each page in all four ways; daily, every sixth page in one of them.
    for number, name in enumerate(names if LONG else names[::6]):
        tab.goto(f"{address}/{name}")
        ways = list(product(WIDTHS.items(), SCHEMES.items()))
        for (width, pixels), (scheme, shown) in ways if LONG else [ways[number % 4]]:
            place = f"{name}, {width}, {scheme}"
            tab.set_viewport_size({"width": pixels, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            tab.wait_for_function(f"document.body.dataset.mdColorScheme === '{shown}'")
            seen = tab.evaluate(LOOK)
            if seen["wide"] > 0:
                # On a busy machine a page may not have its new width yet.
                tab.wait_for_timeout(500)
                seen = tab.evaluate(LOOK)
            if seen["wide"] > 0 or seen["flat"] or seen["broken"]:
                faults.append((place, seen))
    assert not faults
    assert not refused


def test_search_finds_a_strategy(tab, server):
    # Once its script listens, the page reads the field on focus and on key up.
    tab.goto(f"{server[0]}/index.html", wait_until="networkidle")
    tab.fill("input[name=query]", "scissorhand")
    tab.press("input[name=query]", "s")
    tab.wait_for_selector(".md-search-result__item a")
    assert "scissorhands" in tab.inner_text(".md-search-result__list").lower()
