"""Strategies from other packages: installed, in named modules, broken, or missing."""

import importlib.util
import json
import os
import shutil
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

from gracekv import recipes
from gracekv.errors import ConfigError, PluginError, PluginWarning, UnknownStrategyError
from gracekv.evaluate import Experiment
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline, save_pipeline
from gracekv.registry import plugins
from gracekv.segment import SEGMENTERS
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from support.fresh_python import fresh_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The template package, built and installed into its own folder."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    project = tomllib.loads((folder / "source" / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["requires-python"] == ">=3.11"
    backend = project["build-system"]["build-backend"]
    build = f"import sys; from {backend} import build_wheel; build_wheel(sys.argv[1])"
    fresh_python("-c", build, folder, cwd=folder / "source")
    # pip, which takes seconds, does no more with a wheel of Python files alone.
    shutil.unpack_archive(next(folder.glob("*.whl")), folder / "site", "zip")
    return folder / "site"


def python(code, *argv, site=None, **options):
    """Run `code` in a fresh process."""
    paths = os.pathsep.join(str(path) for path in (ROOT, site) if path is not None)
    return fresh_python("-c", code, *argv, PYTHONPATH=paths, COLUMNS="200", **options)


def test_the_templates_own_tests_pass(installed):
    tests = ROOT / "examples" / "plugin" / "tests"
    # Most of its time goes to imports, whose objects are no garbage.
    code = "import gc, pytest, sys; gc.disable(); sys.exit(pytest.main(sys.argv[1:]))"
    quiet = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tests)
    python(code, *quiet, tests, site=installed, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


SHELLS = """
import json, sys
from gracekv.cli.main import main
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def shells(*commands, **options):
    """Run several commands in one fresh process, as `python`; the first that fails ends it."""
    return python(SHELLS, json.dumps([[*map(str, words)] for words in commands]), **options)


@pytest.mark.long
def test_an_installed_plugin_is_known_in_every_process(installed, tmp_path):
    for part in (tiny_llama(vocabulary=2000), tiny_tokenizer(vocabulary=2000)):
        part.save_pretrained(tmp_path / "model")
    story = tmp_path / "story.txt"
    story.write_text("Alice fell. The rabbit ran. Who sat there? " * 12)
    asked = ["--context", story, "--question", "Who?", "--ratio", 2]
    saved = tmp_path / "saved.gracekv"
    model = ["--model", tmp_path / "model", "--max-new-tokens", 2]
    compress = ["compress", *model, *asked, "--pipeline", "rare-tokens", "--save", saved]
    out = shells(["list"], compress, site=installed).stdout
    assert "rare_tokens" in out
    assert "rare-tokens" in out
    shells(["generate", saved, *model], site=installed)
    # Where it is not installed, the file names what is missing.
    err = shells(["generate", saved, *model], status=2).stderr
    assert "gracekv_rare_tokens.rare_tokens" in err
    assert "gracekv-rare-tokens 0.1.0" in err


MINE = '''
from dataclasses import dataclass
from typing import final
from gracekv import recipes
from gracekv.segment import SEGMENTERS, Segmenter, Uniform

@final
@SEGMENTERS.register("mine")
@dataclass(frozen=True)
class Mine(Segmenter):
    """Slots of one length."""

    length: int = 32

    def __call__(self, prefill, region):
        return Uniform(self.length)(prefill, region)

recipes.register("mine", recipes.Recipe("Mine", "a test", {"segment": "mine"}))
'''


def test_the_shell_imports_a_named_module(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "experiment.yaml").write_text("model: nothing\nimports: [mine]\n")
    words = [["list", "--import", name] for name in ("mine", "yours")]
    done = shells(*words, cwd=tmp_path, status=2)
    assert "Slots of one length." in done.stdout
    assert "PluginError: The module 'yours'" in done.stderr
    assert "Install its package" in done.stderr


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a module that registers a segmenter and a recipe; removed afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(SEGMENTERS, "_classes", dict(SEGMENTERS._classes))
    monkeypatch.setattr(recipes, "RECIPES", dict(recipes.RECIPES))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("mine", None)


def test_files_carry_the_modules_that_they_need(mine):
    with pytest.raises(UnknownStrategyError, match="--import MODULE"):
        Pipeline.from_dict({"segment": "mine"})
    data = {"imports": ["mine"], "segment": {"name": "mine", "length": 16}}
    (mine / "given.json").write_text(json.dumps(data))
    pipeline = load_pipeline(mine / "given.json")
    assert plugins.foreign_modules(pipeline) == {"mine": ""}
    for suffix in ("yaml", "toml", "json"):
        save_pipeline(pipeline, mine / f"saved.{suffix}")
        assert load_pipeline(mine / f"saved.{suffix}") == pipeline
    assert "mine" in (mine / "saved.yaml").read_text()


def test_experiments_import_before_they_read_their_panels(mine):
    data = {
        "model": "smollm2", "imports": ["mine"], "methods": ["mine", "gracekv[segment=mine]"],
        "tasks": ["ruler:cwe"], "ratios": [4],
    }  # fmt: skip
    experiment = Experiment.from_dict(data)
    assert experiment.imports == ("mine",)
    assert Experiment.from_dict(experiment.to_dict()) == experiment
    for wrong in ("mine", [3], [""]):
        with pytest.raises(ConfigError, match="imports in an experiment takes a list of modules"):
            Experiment.from_dict({**data, "imports": wrong})
    with pytest.raises(PluginError, match=r"'yours'.*cannot be imported"):
        Experiment.from_dict({**data, "imports": ["yours"]})


def test_names_that_are_taken_are_refused():
    with pytest.raises(ConfigError, match="recipe 'snapkv' is already registered"):
        recipes.register("snapkv", recipes.Recipe("mine", "a test"))
    recipes.register("snapkv", recipes.find("snapkv"))
    with pytest.raises(ConfigError, match=r"register takes a .*; got dict"):
        recipes.register("mine", {"floor": "none"})


def test_a_missing_module_is_named_with_its_package():
    text = plugins.missing_modules({"absent.scorers": "absent-scorers 1.2", "script": "", "os": ""})
    assert "'absent.scorers' (package absent-scorers 1.2: install it), 'script' (import it)" in text
    assert "os" not in text.replace("absent-scorers", "")
    assert plugins.missing_modules({"os": ""}) == ""


class Entry:
    """The part of an entry point that loading plugins uses."""

    def __init__(self, name, action):
        self.name, self.value, self.load = name, f"{name}_module", action


@pytest.fixture
def entries(monkeypatch):
    """The entry points that plugins are loaded from; none was loaded before."""
    entries = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(plugins, "_tried", {})
    return entries


class Quits(BaseException):
    """Neither an error nor an interrupt."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [RuntimeError("no device"), SystemExit("no device"), Quits(3)])
def test_plugins_load_in_order_and_a_broken_one_harms_no_other(entries, error):
    seen = []
    entries += [
        Entry("c", lambda: seen.append("c")),
        Entry("b", Mock(side_effect=error)),
        Entry("a", lambda: seen.append("uniform" in SEGMENTERS)),
    ]
    why = f"{type(error).__name__}: {error}"
    with pytest.warns(PluginWarning, match=rf"'b' \(b_module\) .* {why}"):
        len(SEGMENTERS)
    assert seen == [True, "c"]
    with pytest.raises(UnknownStrategyError, match=f"plugin 'b' is broken: {why}"):
        SEGMENTERS.get("of_b")
    # Reported once.
    len(SEGMENTERS)
    assert seen == [True, "c"]


def test_an_interrupt_while_plugins_load_loses_none_of_them(entries):
    seen, interrupts = [], [KeyboardInterrupt]

    def interrupted():
        if interrupts:
            raise interrupts.pop()
        seen.append("b")

    entries += [
        Entry("a", lambda: seen.append("a")),
        Entry("b", interrupted),
        Entry("c", lambda: seen.append("c")),
    ]
    with pytest.raises(KeyboardInterrupt):
        len(SEGMENTERS)
    assert seen == ["a"]
    # Concurrent threads see all of them, each loaded once.
    barrier = threading.Barrier(4)

    def read(_):
        barrier.wait()
        len(SEGMENTERS)
        return tuple(seen)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(read, range(4))) == {("a", "b", "c")}


def test_a_named_module_that_ends_the_program_is_an_error(mine):
    (mine / "quits.py").write_text("raise SystemExit(3)")
    with pytest.raises(PluginError, match=r"'quits'.*SystemExit: 3"):
        plugins.import_modules(["quits"])
    with pytest.raises(PluginError, match=r"folder with mine\.py and give its name: 'mine'\."):
        plugins.import_modules(["mine.py"])
