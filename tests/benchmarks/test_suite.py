"""`benchmarks/suite.py` on synthetic rows: separate protocols, intervals, complete samples."""

from pathlib import Path

import pytest

from gracekv.evaluate import Experiment
from support.evaluation_rows import grid, row, written

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AGNOSTIC = ("smollm2_agnostic.yaml", "smollm2_agnostic_tuning.yaml")
RATIOS = ("4x", "64x")
# How many protocols they have.
NO_SUITE = {AGNOSTIC[1]: 1, "smollm2_two_pass.yaml": 1, "smollm2_fit.yaml": 2}
CONFIGS = sorted(path.name for path in BENCHMARKS.glob("smollm2_*.yaml"))


@pytest.fixture
def suite(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite.machine, "commit", lambda: "abc")
    return suite


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_can_be_read_and_say_what_is_seen(suite, name):
    found = {panel.protocol for panel in Experiment.load(BENCHMARKS / name).panels}
    want = {made.protocol for made in suite.SUITES.values() if made.config == name}
    assert found == want or ("query_agnostic" in found and len(found) == NO_SUITE[name])


def test_no_sample_is_in_both_agnostic_halves():
    """By seed where texts are made here, else by number."""
    found = [
        {
            (task.name, None if given else task.seed, index if given else None)
            for panel in Experiment.load(BENCHMARKS / name).panels
            for task in panel.all_tasks()
            for given in [
                task.name in ("ruler:qa_1", "ruler:qa_2", "shared_context:squad")
                or task.length is None
            ]
            for index in range(panel.first, panel.first + panel.samples)
        }
        for name in AGNOSTIC
    ]
    assert all(found)
    assert not found[0] & found[1]


def test_what_is_published_was_not_tuned_on():
    """No config has a sample of the tuning half; answers have their own seeds."""
    seeds = []
    for name in CONFIGS:
        for panel in Experiment.load(BENCHMARKS / name).panels:
            if panel.generate:
                seeds.append((name, panel.seed))
            assert panel.seed != 142 or name == AGNOSTIC[1]
    of = dict(seeds)
    assert len(set(of.values())) == len(of) == 2


def test_the_page_and_its_picture(suite, monkeypatch, tmp_path):
    made = suite.SUITES["smollm2-agnostic"]
    costs = {"construction_seconds": 1.0, "prefill_seconds": 2.0, "bytes": {"kv": 1, "full_kv": 4}}
    scores = {(name, x): [0.5, 0.2 + n / 10] for n, name in enumerate(made.placed) for x in RATIOS}
    rows = [
        {**row, "settings": {"protocol": "query_agnostic"}, "score": None, **costs}
        for row in grid({("fullkv", "full"): [1.0, 1.0], **scores})
    ]
    folder = written(tmp_path / "runs", rows)
    monkeypatch.setattr("sys.argv", ["suite.py", str(folder), "--name", "smollm2-agnostic"])
    suite.main()
    assert (tmp_path / "smollm2-agnostic.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "smollm2-agnostic.md").read_text()
    assert "`gracekv-agnostic` is first in 0, tied with the first in 2 more" in text
    assert "| kvzip-two-pass | 4x | " in text


def test_tasks_weigh_the_same_and_methods_share_prompts(suite):
    """Three prompts of one task, two of another; one more that only the other method has."""
    made, log_kl = suite.SUITES["ablations"], suite.measure("log_kl")
    scores = {"a": [0.1, 0.5, 0.9], "b": [0.2, 0.8]}
    rows = [
        row(method, "64x", index, score**power, task=f"ruler:{task}")
        for method, power in ((made.ours, 1), ("other", 2))
        for task, found in scores.items()
        for index, score in enumerate(found)
    ]
    found = suite.make_tables(rows, log_kl, made.ours)
    table = suite.tables.means(found, (made.ours, "other"), log_kl, made)
    means = [line.split(" | ")[1:] for line in table.splitlines()[2:]]
    ours, other = (float(cells[0].strip(" |")) for cells in means)
    text = suite.tables.differences(rows, found, log_kl, made, made.ours)
    gap = float(text.split("| other | ")[1].split(" [")[0])
    assert gap == pytest.approx(other - ours, abs=0.01)
    more = [*rows, row("other", "64x", 9, 0.0, task="ruler:b")]
    assert suite.tables.by_task(more, log_kl) == suite.tables.by_task(rows, log_kl)
