"""The figures match the recorded run and the published tables, and are small enough to load."""

import re
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
from page_blocks import ROOT, pages

from support.fresh_python import fresh_python

FIGURES = ROOT / "docs" / "figures"
DRAWN = ROOT / "docs" / "assets" / "figures"


@pytest.mark.long
@pytest.mark.skipif(
    f"matplotlib=={version('matplotlib')}" not in (ROOT / "constraints.txt").read_text().split(),
    reason="another matplotlib than the pinned one draws other outlines",
)
def test_what_is_committed_is_what_is_drawn(tmp_path):
    fresh_python(FIGURES / "all.py", tmp_path, PYTHONPATH=str(ROOT))
    fresh = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in DRAWN.iterdir()}
    assert fresh.keys() == committed.keys(), "run: make figures"
    assert not [name for name in fresh if fresh[name] != committed[name]], "run: make figures"


def test_files_are_small_and_load_nothing():
    for path in DRAWN.iterdir():
        assert path.stat().st_size < 300_000, path.name
        for element in ElementTree.parse(path).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:image/")), f"{path.name}: {value}"


def test_every_figure_is_shown_in_both_schemes():
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages())
    shown = set(re.findall(r"assets/figures/([\w-]+\.svg)#only-(light|dark)", text))
    assert all(name.endswith(f"-{theme}.svg") for name, theme in shown)
    assert {name for name, _ in shown} == {path.name for path in DRAWN.iterdir()}
