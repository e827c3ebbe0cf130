"""Every code block of README and site is executed, in the order in which a reader meets it.

A page's blocks share one folder and, if Python, one namespace. Anything that a page assumes but
does not show (a second book, say) is in `preambles/NAME.py`, NAME being the page's path with dashes
for slashes; it runs first, in that namespace. A block with `title="x.py"` (or .yaml, .toml) is a
reader's file, written under that name; a Python one is imported. Stand-ins for models and long runs
are in `conftest.py`.

- python: executed. bash: see `shell_lines`. text: output, not code.
  A text block right after a Python one is its exact output. Pages in `REAL` show output of the
  embedded model: they run again with that model, in the long tests.
- yaml, toml, json: read as a pipeline, as an experiment if it names tasks, or as a part of a
  package's pyproject.toml if it begins with a project.
"""

import contextlib
import importlib
import io
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from page_blocks import ROOT, blocks, commands, pages
from shell_lines import check

from gracekv import recipes
from gracekv.evaluate import Experiment
from gracekv.pipeline.composition import REGISTRIES
from gracekv.pipeline.config import load_pipeline
from gracekv.registry.plugins import GROUP

PREAMBLES = Path(__file__).parent / "preambles"
LANGUAGES = ("python", "bash", "yaml", "toml", "json", "text")


def name_of(page):
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/").replace("/", "-")


WITH_CODE = [page for page in pages() if blocks(page)]
REAL = ("getting-started",)


@pytest.fixture
def registries(monkeypatch):
    """Strategies, recipes and modules that a page adds are removed afterwards."""
    monkeypatch.setattr(recipes, "RECIPES", dict(recipes.RECIPES))
    strategies = {stage: dict(registry._classes) for stage, registry in REGISTRIES.items()}
    modules = set(sys.modules)
    yield
    for stage, registry in REGISTRIES.items():
        registry._classes.clear()
        registry._classes.update(strategies[stage])
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path.cwd())):
            del sys.modules[name]


class Page:
    """A reader's way through a page."""

    def __init__(self, folder, name, real=False):
        self.folder = folder
        self.checks_output = real or name not in REAL
        self.printed = None
        self.names = {"__name__": "__main__"}
        self.history = []
        preamble = PREAMBLES / f"{name}.py"
        if preamble.is_file():
            exec(compile(preamble.read_text(), str(preamble), "exec"), self.names)

    def do(self, block):
        if block.title:
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        printed, self.printed = self.printed, None
        if block.language == "text":
            if printed is not None and self.checks_output:
                assert printed.split() == block.code.split(), block.place
            return
        getattr(self, block.language)(block)

    def python(self, block):
        if block.title:
            importlib.invalidate_caches()
            importlib.import_module(Path(block.title).stem)
            return
        # Leading blank lines, so that a traceback names the page's own line.
        code = "\n" * (block.line - 1) + block.code
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(ROOT / block.page), "exec"), self.names)
        self.printed = out.getvalue()

    def bash(self, block):
        for words in commands(block.code):
            check(words, block.place, self.history)

    def yaml(self, block):
        self.settings(block, yaml.safe_load(block.code), ".yaml")

    def toml(self, block):
        self.settings(block, tomllib.loads(block.code), ".toml")

    def json(self, block):
        self.settings(block, yaml.safe_load(block.code), ".json")

    def settings(self, block, data, suffix):
        if "project" in data:
            assert list(data["project"]["entry-points"]) == [GROUP]
            return
        if "tasks" in data:
            Experiment.from_dict(data)
            return
        path = self.folder / f"block{suffix}"
        path.write_text(block.code, encoding="utf-8")
        load_pipeline(path)


def cases():
    """Pages with code; the one on evaluations runs a dozen evaluations."""
    for page in WITH_CODE:
        name = name_of(page)
        yield pytest.param(page, id=name, marks=[pytest.mark.long] if name == "evaluation" else [])


@pytest.mark.parametrize("page", list(cases()))
def test_blocks_run_and_print_what_the_page_says(page, reader, registries):
    go_through(page, reader)


@pytest.mark.long
@pytest.mark.parametrize("tiny", ["smollm2"], indirect=True)
@pytest.mark.parametrize("name", REAL)
def test_the_embedded_model_says_what_the_page_says(name, reader, registries):
    go_through(ROOT / "docs" / f"{name}.md", reader, real=True)


def go_through(page, folder, real=False):
    visit = Page(folder, name_of(page), real)
    for block in blocks(page):
        assert block.language in LANGUAGES, (
            f"{block.place}: {block.language!r} is not run; use one of {', '.join(LANGUAGES)}"
        )
        visit.do(block)


def test_every_preamble_has_its_page():
    # Docstrings have their own test.
    names = {name_of(page) for page in WITH_CODE} | {"docstrings"}
    assert {path.stem for path in PREAMBLES.glob("*.py")} <= names
