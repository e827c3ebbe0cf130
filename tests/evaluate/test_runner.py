"""Whole runs on a tiny model: rows, resumption after a kill, failures, shards."""

import os
import shutil
import signal
import subprocess
import sys
import time
from copy import copy
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import pytest
import torch
import transformers

from gracekv.errors import ConfigError, TaskError
from gracekv.evaluate import run, runner, worker
from gracekv.evaluate.row_files import read_rows
from gracekv.evaluate.runner import Shard
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import Task
from gracekv.testing.models import tiny_llama
from gracekv.value import WindowAttention

METHODS = ["fullkv", "gracekv", "gracekv-no-global"]
PANEL = {"tasks": ["ruler:niah_multikey_1", "longbench:qasper"], "methods": METHODS}
PANEL |= {"ratios": [2, 4], "lengths": [512], "samples": 2, "max_new_tokens": 4}
CELLS = 2 * 2 * 5


@pytest.fixture(scope="module")
def tiny(model, tokenizer):
    return {"model": model, "tokenizer": tokenizer}


def prompts_of(run_it):
    """The prompts of all prefills of a run, and its return value."""
    seen, real = [], worker.capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "capture", lambda *a: seen.append(a[1]) or real(*a))
        return seen, run_it()


@pytest.fixture(scope="module")
def plain(tmp_path_factory, experiment, tiny):
    """A whole run: its folder, the return value of `run`, and the number of prefills."""
    folder = tmp_path_factory.mktemp("plain")
    seen, done = prompts_of(lambda: run(experiment, folder, **tiny))
    return folder, done, len(seen)


@pytest.fixture
def finished(plain, tmp_path):
    """A copy of its folder, for changes."""
    return shutil.copytree(plain[0], tmp_path / "finished")


def test_a_row_says_everything(plain):
    folder, done, prefills = plain
    rows = read_rows(folder)
    # One prefill serves all cells of a sample.
    assert prefills == 4
    assert (done.written, done.failed, done.kept, len(rows)) == (CELLS, 0, 0, CELLS)
    for row in rows:
        assert (row["error"], row["new_tokens"], row["seed"]) == (None, 4, 42)
        assert 0 <= row["score"] <= 1
        assert row["ms_per_token"] > 0
        assert row["construction_seconds"] > 0
        assert row["pipeline"]["segment"]["name"]
        assert row["versions"]["torch"]
    # Every method saw the same ids.
    for sample in {row["sample"] for row in rows}:
        assert len({row["prompt_hash"] for row in rows if row["sample"] == sample}) == 1
    full = [row for row in rows if row["method"] == "fullkv"]
    assert all(row["column"] == "full" and row["fidelity"]["kl"] == 0 for row in full)
    four = [row for row in rows if row["column"] == "4x"]
    assert all(row["entries"]["spent"] <= row["entries"]["full"] / 4 for row in four)
    assert all(row["bytes"]["kv"] < row["bytes"]["full_kv"] for row in four)


def test_a_finished_run_changes_nothing(experiment, tiny, finished):
    before = (finished / "rows-main.jsonl").read_bytes()
    again = run(experiment, finished, **tiny)
    assert (again.written, again.kept) == (0, CELLS)
    assert (finished / "rows-main.jsonl").read_bytes() == before


def test_a_failure_is_a_row_and_the_run_goes_on(experiment, tiny, tmp_path):
    # 400x leaves less than the recent window.
    broken = replace(experiment, panels=(replace(experiment.panels[0], ratios=(2.0, 400.0)),))
    done = run(broken, tmp_path, **tiny)
    assert (done.written, done.failed) == (CELLS, 8)
    failed = [row for row in read_rows(tmp_path) if row["error"] is not None]
    assert {row["column"] for row in failed} == {"400x"}
    assert {row["error"]["type"] for row in failed} == {"BudgetError"}
    assert all("score" not in row for row in failed)
    assert run(broken, tmp_path, **tiny).failed == 8
    assert run(broken, tmp_path, retry_failed=True, **tiny).written == 8


def test_a_strategy_that_breaks_the_prefill_fails_alone(experiment, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(WindowAttention, "needs", lambda self: 1 / 0)
    panel = replace(experiment.panels[0], methods=("fullkv", "snapkv"), ratios=(2.0,), samples=1)
    done = run(replace(experiment, panels=(panel,)), tmp_path, **tiny)
    assert (done.written, done.failed) == (4, 2)
    assert {row["method"] for row in read_rows(tmp_path) if row["error"] is not None} == {"snapkv"}


def test_prompts_are_cut_as_the_panel_says(experiment, tiny, tmp_path):
    few = {"tasks": ("longbench:qasper",), "methods": ("fullkv",), "samples": 1}
    panel = replace(experiment.panels[0], **few, fidelity=False)
    small = tiny | {"model": tiny_llama(vocabulary=2000, positions=204)}  # 4 are the answer's
    rows, most = [], {"max_prompt": 200}
    for changes in ({}, most, most | {"truncate": "start"}, most | {"truncate": "error"}):
        folder, cut = tmp_path / str(len(rows)), replace(panel, **changes)
        run(replace(experiment, panels=(cut,)), folder, **(tiny if changes else small))
        rows += read_rows(folder)
    model, middle, start, refused = rows
    assert middle["prompt_tokens"] == start["prompt_tokens"] == 200
    assert model["prompt_hash"] == middle["prompt_hash"] != start["prompt_hash"]
    assert refused["error"]["type"] == "TaskError"


def test_missing_data_are_found_before_anything_runs(experiment, tiny, tmp_path):
    panel = replace(experiment.panels[0], tasks=("ruler:qa_1",))
    with pytest.raises(TaskError, match="need qa/squad"):
        run(replace(experiment, panels=(panel,), data=None), tmp_path, **tiny)
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "qasper.jsonl").write_text("<html>404</html>")
    with pytest.raises(TaskError, match=r"qasper\.jsonl is no longbench:qasper file"):
        run(replace(experiment, data=str(tmp_path)), tmp_path, **tiny)
    (tmp_path / "longbench" / "trec.jsonl").write_text(
        '{"context": "It was late.", "input": "When?", "answers": "late"}'
    )
    with pytest.raises(TaskError, match="answers of record 0 must be a list"):
        Sources(tmp_path).records("longbench:trec")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tokenizer": None}, "its tokenizer together"), ({"shard": "0/2"}, "Shard, such as")],
)
def test_what_a_run_cannot_use_is_refused(experiment, tiny, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(experiment, tmp_path, **{**tiny, **options})


def test_shards_share_the_work_and_the_folder(experiment, tiny, tmp_path, plain):
    parts = [run(experiment, tmp_path / "all", shard=Shard(i, 3), **tiny) for i in range(3)]
    assert [part.written for part in parts] == [CELLS // 2, CELLS // 4, CELLS // 4]
    assert not any(part.failed for part in parts)
    assert len(list((tmp_path / "all").glob("rows-*of3.jsonl"))) == 3

    def results(folder):
        rows = read_rows(folder)
        return {x["key"]: (x["prompt_hash"], x["prediction"], x["fidelity"]) for x in rows}

    assert results(tmp_path / "all") == results(plain[0])


def test_query_agnostic_compression_does_not_see_the_question(experiment, tiny, tmp_path, plain):
    panel = replace(experiment.panels[0], protocol="query_agnostic", methods=("fullkv", "gracekv"))
    seen, _ = prompts_of(lambda: run(replace(experiment, panels=(panel,)), tmp_path, **tiny))
    assert all(row["error"] is None for row in read_rows(tmp_path))
    # One token more than the context, since a prompt's last token has no entry.
    assert all(prompt.spans.length == prompt.spans.context_end + 1 for prompt in seen)
    # FullKV is the same under both protocols; compressed caches are not.

    def both(method, field):
        """A field of the method's rows under either protocol, by task, sample and budget."""
        for folder, protocol in ((tmp_path, "query_agnostic"), (plain[0], "query_aware")):
            yield {
                (row["task"], row["index"], row["column"]): row[field]
                for row in read_rows(folder)
                if row["method"] == method and row["settings"]["protocol"] == protocol
            }

    agnostic, aware = both("fullkv", "prediction")
    assert agnostic == aware
    agnostic, aware = both("gracekv", "fidelity")
    assert any(agnostic[k]["kl"] != aware[k]["kl"] for k in agnostic)


def test_other_data_under_the_same_names_are_noticed(experiment, tiny, finished, monkeypatch):
    rows = (finished / "rows-main.jsonl").read_bytes().split(b"\n")
    # A row is missing, and its data have changed since.
    (finished / "rows-main.jsonl").write_bytes(b"\n".join([*rows[:-2], b""]))
    from gracekv.evaluate import tasks

    real = tasks.GIVEN["longbench"]

    def changed(*args):
        sample = real(*args)
        return replace(sample, context=sample.context + " More.")

    monkeypatch.setitem(tasks.GIVEN, "longbench", changed)
    done = run(experiment, finished, **tiny)
    assert (done.written, done.failed) == (1, 1)
    assert "have changed" in read_rows(finished)[-1]["error"]["message"]


@pytest.mark.parametrize("answer", ["Keeper0", "Somebody"])
def test_another_file_under_the_same_name_has_the_samples_of_the_rows(
    experiment, tiny, finished, small_data, tmp_path, answer
):
    data = shutil.copytree(small_data, tmp_path / "data")
    file = data / "longbench" / "qasper.small.jsonl"
    # As a Windows editor saves it.
    file.write_text(file.read_text().replace("Keeper0", answer), encoding="utf-8-sig")
    before, again = read_rows(finished), replace(experiment, data=str(data))
    if answer == "Keeper0":
        assert run(again, finished, **tiny).written == 0
    else:
        with pytest.raises(TaskError, match=r"Sample 0 of longbench:qasper differs.* new folder"):
            run(again, finished, **tiny)
    assert read_rows(finished) == before


@pytest.mark.parametrize(("finished", "change"), [(True, "config"), (False, "weights")])
def test_another_model_under_the_same_name_is_refused(experiment, tiny, tmp_path, finished, change):
    one = replace(experiment, panels=(replace(experiment.panels[0], samples=1),))
    run(one, tmp_path, **tiny)
    before = (tmp_path / "rows-main.jsonl").read_bytes()
    other = tiny_llama(vocabulary=2000, layers=3 if change == "config" else 2)
    if change == "weights":
        # One matrix, as after further training of a checkpoint.
        with torch.no_grad():
            other.get_decoder().layers[1].mlp.up_proj.weight.add_(1e-3)
    with pytest.raises(ConfigError, match=rf"another model .* 'tiny' \(other .*{change}"):
        run(one if finished else experiment, tmp_path, model=other, tokenizer=tiny["tokenizer"])
    assert (tmp_path / "rows-main.jsonl").read_bytes() == before


SCRIPT = """
import sys
from gracekv.evaluate import Experiment, run
run(Experiment.load(__import__("pathlib").Path(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.long
def test_a_killed_run_goes_on_without_repeating_or_losing_a_row(experiment, model_folder, tmp_path):
    import yaml

    named = replace(experiment, model=str(model_folder))
    config, folder = tmp_path / "run.yaml", tmp_path / "rows"
    config.write_text(yaml.safe_dump(named.to_dict()))
    command = [sys.executable, "-c", SCRIPT, str(config), str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    path = folder / "rows-main.jsonl"
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    survived = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    assert 3 <= survived.count(b"\n") < CELLS
    run(named, folder)
    assert path.read_bytes().startswith(survived)
    rows = read_rows(folder)
    assert len(rows) == len({row["key"] for row in rows}) == CELLS


def test_a_run_goes_on_on_another_day(experiment, tiny, tmp_path, monkeypatch):
    """Templates of Llama 3.2 and others show the date: it stays that of the first row."""
    dated = copy(tiny["tokenizer"])
    dated.chat_template = (
        "{{ strftime_now('%d.%m') }} {{ enable_thinking }} {{ messages[0].content }}"
    )

    def on(day):
        monkeypatch.setattr(runner, "date", SimpleNamespace(today=lambda: day))
        seen, done = prompts_of(lambda: run(experiment, tmp_path, **tiny | {"tokenizer": dated}))
        assert all(prompt.parts[0].startswith("31.12 False ") for prompt in seen)
        return done

    assert on(date(2029, 12, 31)).failed == 0
    file = tmp_path / "rows-main.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    after = on(date(2030, 1, 1))
    assert (after.written, after.failed, after.kept) == (1, 0, CELLS - 1)


def test_progress_shows_every_row_and_failure(experiment, tiny, tmp_path, capsys):
    panel = replace(experiment.panels[0], tasks=("ruler:cwe",), lengths=(256,), samples=1)
    run(replace(experiment, panels=(panel,)), tmp_path, progress=True, **tiny)
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert shown.count("failed:") == 5


def test_a_run_that_is_cut_short_is_balanced(plain):
    rows = read_rows(plain[0])
    samples = list(dict.fromkeys((row["task"], row["index"]) for row in rows))
    niah, qasper = PANEL["tasks"]
    assert samples == [(niah, 0), (qasper, 0), (niah, 1), (qasper, 1)]
    assert [row["method"] for row in rows[:3]] == ["fullkv", "gracekv", "gracekv"]


def test_prompts_are_as_long_as_the_model_was_made_for(experiment, tokenizer):
    stretched = tiny_llama(vocabulary=2000, rope="yarn", positions=256, original=256)
    images = tiny_llama(vocabulary=2000, positions=300)
    # A model that reads images has a separate text config.
    images.config = transformers.LlavaConfig(text_config=images.config)
    for model, positions in ((stretched, 4 * 256), (images, 300)):
        ready = worker.Worker("tiny", "float32", model, tokenizer, None, "2026-01-01")
        longest = ready.longest_prompt(experiment.panels[0], Task("longbench:qasper", None, 0))
        assert longest == positions - PANEL["max_new_tokens"]
