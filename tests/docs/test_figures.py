"""The figures are those of the recorded run and the published tables, and small enough to load."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
from page_blocks import ROOT, pages

FIGURES = ROOT / "docs" / "figures"
DRAWN = ROOT / "docs" / "assets" / "figures"


@pytest.fixture(scope="module")
def capture():
    return json.loads((FIGURES / "capture.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.skipif(
    f"matplotlib=={version('matplotlib')}" not in (ROOT / "constraints.txt").read_text().split(),
    reason="another matplotlib than the pinned one draws other outlines",
)
def test_what_is_committed_is_what_is_drawn(tmp_path):
    command = [sys.executable, str(FIGURES / "all.py"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, env=env)
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


def test_the_recorded_entries_add_up(capture):
    kept = capture["accounting"]
    heads = [n for layer in capture["entries"][str(capture["ratio"])] for n in layer]
    assert sum(heads) == kept["spent"] <= kept["budget"]
    bought = capture["auction"]["entries"]
    paid = sum(bought[name] for name in ("floor", "Add", "Split"))
    assert paid == kept["spent"] - kept["recent"] * len(heads)
    assert bought["floor"] == kept["floor"]


def test_the_recorded_tree_is_a_tree_whose_frontier_covers_its_slot(capture):
    tree = capture["tree"]
    nodes = list(zip(tree["start"], tree["end"], strict=True))
    start, end = capture["slots"][tree["slot"] :][:2]
    assert nodes[0] == (start, end)
    for (a, b), parent in zip(nodes[1:], tree["parent"][1:], strict=True):
        assert nodes[parent][0] <= a < b <= nodes[parent][1]
        assert tree["level"][nodes.index((a, b))] == tree["level"][parent] + 1
    kept = sorted(node for node, is_kept in zip(nodes, tree["kept"], strict=True) if is_kept)
    assert [a for a, _ in kept] == [start, *[b for _, b in kept[:-1]]]
    assert kept[-1][1] == end
    heads = len(capture["entries"]["8"][0])
    same = capture["states"][tree["layer"] * heads + tree["head"]]
    assert [list(node) for node in kept] == same


def test_the_recorded_slots_and_scores_cover_the_region(capture):
    start, end = capture["region"]
    assert capture["slots"][0] == start
    assert capture["slots"][-1] == end
    for name, score in capture["relevance"].items():
        assert len(score) == end - start
        if not name.startswith("seeds"):
            assert sum(score) == pytest.approx(1, abs=1e-3), name
    assert len(capture["tokens"]) == len(capture["boundary_score"])
