"""`benchmarks/suite.py` on made-up rows: protocols apart, answers with intervals, whole samples."""

import json
import sys
from pathlib import Path

import pytest

from gracekv.errors import ConfigError
from gracekv.evaluate import Experiment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AGNOSTIC = ("smollm2_agnostic.yaml", "smollm2_agnostic_tuning.yaml")
CONFIGS = sorted(path.name for path in BENCHMARKS.glob("smollm2_*.yaml"))


@pytest.fixture
def suite(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite.machine, "commit", lambda: "abc")
    return suite


def rows(protocol, ours, kl):
    """Two groups, two samples and ratios each; `kl` of (group, method) at 2x, twice that at 16x.

    Other methods than ours and snapkv have rows where `kl` has them.
    """
    tasks = {"retrieval": "ruler:niah_multikey_1", "single_doc_qa": "longbench:qasper"}
    for group, task in tasks.items():
        for method in dict.fromkeys(("fullkv", ours, "snapkv", *(name for _, name in kl))):
            for column in ["full"] if method == "fullkv" else ["2x", "4x", "16x", "64x"]:
                for index in range(2):
                    far = {"2x": 1, "4x": 1.5, "16x": 2}.get(column, 3)
                    found = 0.0 if method == "fullkv" else kl[group, method] * far * (1 + index)
                    yield {
                        "key": f"{protocol}|{method}|{column}|{task}|{index}",
                        "sample": f"{protocol}|{task}|{index}", "prompt_hash": f"{task}|{index}",
                        "model": "tiny", "dtype": "float32", "task": task, "length": 1024,
                        "seed": 1, "index": index, "settings": {"protocol": protocol},
                        "group": group, "metric": "set_recall", "method": method, "column": column,
                        "versions": {}, "source": "generated", "error": None,
                        "fidelity": {"kl": found, "top1": 1 - found}, "prefill_seconds": 2.0,
                        "construction_seconds": 0.5, "bytes": {"kv": 10, "full_kv": 40},
                    }  # fmt: skip


def written(folder, found):
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in found)
    (folder / "rows-main.jsonl").write_text(text, encoding="utf-8")
    return folder


def kls(ours):
    """Ours is first on texts, second on needles."""
    return {
        ("retrieval", ours): 0.04, ("retrieval", "snapkv"): 0.02,
        ("single_doc_qa", ours): 0.01, ("single_doc_qa", "snapkv"): 0.03,
    }  # fmt: skip


def test_what_chooses_bits_has_standings_of_its_own(suite, monkeypatch, tmp_path):
    ours, bits = "gracekv-agnostic", "gracekv-agnostic-allocated"
    kl = {**kls(ours), ("retrieval", bits): 0.01, ("single_doc_qa", bits): 0.02}
    runs = written(tmp_path / "runs", rows("query_agnostic", ours, kl))
    monkeypatch.setattr(sys, "argv", ["suite.py", str(runs), "--name", "smollm2-agnostic"])
    suite.main()
    page = (tmp_path / "smollm2-agnostic.md").read_text(encoding="utf-8")
    # Neither competes with the other: both are first on texts, the second one on needles too.
    assert f"Of 8 settings `{ours}` is first in 4" in page
    assert f"## Standings of `{bits}`, at equal bytes" in page
    assert f"Of 8 settings `{bits}` is first in 8" in page


@pytest.mark.parametrize(
    ("protocol", "ours", "name"),
    [
        ("query_aware", "gracekv-plus", "smollm2-default"),
        ("query_agnostic", "gracekv-agnostic", "smollm2-agnostic"),
    ],
)
def test_each_protocol_has_a_page_of_its_own(suite, monkeypatch, tmp_path, protocol, ours, name):
    runs = written(tmp_path / "runs", rows(protocol, ours, kls(ours)))
    monkeypatch.setattr(sys, "argv", ["suite.py", str(runs), "--name", name])
    suite.main()
    page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert "\n- commit: abc\n- model: " in page
    assert f"Of 8 settings `{ours}` is first in 4, tied with the first in 0 more" in page
    assert page.count("**1** |") == 4
    assert (tmp_path / f"{name}.png").is_file()
    # log 0.02 - log 0.04 on needles, log 0.03 - log 0.01 on texts: the same on both prompts.
    assert "| snapkv | +0.20 [+0.20, +0.20] | +0.20 [+0.20, +0.20] |" in page
    agnostic = protocol == "query_agnostic"
    assert page.count("the question not seen") > 0 if agnostic else "not seen" not in page
    assert (f"| {ours} | 0.25 | 25% |" in page) == agnostic
    # Mean of log 0.04 and log 0.08, and of log 0.01 and 0.02.
    needles, texts = f"| {ours} | -2.87 |", f"| {ours} | -4.26 |"
    assert (needles in page.split("needles")[-1]) == agnostic
    assert (texts in page.split("mean over texts")[-1].split("##")[0]) == agnostic


def test_rows_of_both_protocols_are_refused(suite, monkeypatch, tmp_path):
    both = [
        *rows("query_aware", "gracekv-plus", kls("gracekv-plus")),
        *rows("query_agnostic", "gracekv-agnostic", kls("gracekv-agnostic")),
    ]
    folder = str(written(tmp_path / "runs", both))
    monkeypatch.setattr(sys, "argv", ["suite.py", folder, "--name", "smollm2-default"])
    with pytest.raises(ConfigError, match="query_agnostic and query_aware"):
        suite.main()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_can_be_read_and_say_what_is_seen(suite, name):
    found = {panel.protocol for panel in Experiment.load(BENCHMARKS / name).panels}
    want = {made.protocol for made in suite.SUITES.values() if made.config == name}
    assert found == (want or {"query_agnostic"})
    assert want or name == AGNOSTIC[1]


def test_no_sample_is_in_both_agnostic_halves():
    """By seed where texts are made here, else by number."""
    found = []
    for name in AGNOSTIC:
        panels = Experiment.load(BENCHMARKS / name).panels
        found.append(
            {
                (task.name, None if given else task.seed, index if given else None)
                for panel in panels
                for task in panel.all_tasks()
                for given in [task.name in ("ruler:qa_1", "ruler:qa_2", "shared_context:squad")
                              or task.length is None]
                for index in range(panel.first, panel.first + panel.samples)
            }
        )  # fmt: skip
    assert all(found)
    assert not found[0] & found[1]


def test_what_is_published_was_not_tuned_on():
    """No config has a sample of the tuning half; answers have seeds of their own."""
    seeds = []
    for name in CONFIGS:
        for panel in Experiment.load(BENCHMARKS / name).panels:
            if panel.generate:
                seeds.append((name, panel.seed))
            assert panel.seed != 142 or name == AGNOSTIC[1]
    of = dict(seeds)
    assert len(set(of.values())) == len(of) == 2


def scores(count=4):
    """Rows whose answers are right in FullKV, and in one of two prompts in ours."""
    for row in rows("query_aware", "gracekv-plus", kls("gracekv-plus")):
        if row["index"] < count:
            right = row["method"] == "fullkv" or row["index"] == 0
            yield {**row, "score": float(right), "fidelity": None}


def test_answers_have_intervals(suite, monkeypatch, tmp_path):
    runs = written(tmp_path / "runs", scores())
    monkeypatch.setattr(sys, "argv", ["suite.py", str(runs), "--name", "answers"])
    suite.main()
    page = (tmp_path / "answers.md").read_text(encoding="utf-8")
    assert "| niah_multikey_1 | 2 | 100% | 50% | 50% |" in page
    [line] = [line for line in page.splitlines() if line.startswith("| all | 4 | 100% |")]
    assert line.count("50% [0, 100]") == 8


def test_samples_that_were_cut_short_are_left_out(suite):
    found = list(rows("query_aware", "gracekv-plus", kls("gracekv-plus")))
    cut = [row for row in found if row["index"] == 0 or row["column"] != "64x"]
    assert {row["index"] for row in suite.whole(cut)} == {0}
    assert suite.whole(found) == found
    # Nor does a task remain of which no sample was finished.
    task = found[0]["task"]
    cut = [row for row in found if row["task"] != task or row["column"] != "64x"]
    assert {row["task"] for row in suite.whole(cut)} == {row["task"] for row in found} - {task}
    # A panel of other methods over other samples of that length stays.
    other = [
        row | {name: f"other {row[name]}" for name in ("sample", "key")}
        for row in rows("query_aware", "cam", kls("cam"))
    ]
    assert suite.whole([*found, *other]) == [*found, *other]
