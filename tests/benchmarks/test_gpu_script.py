"""`benchmarks/gpu.py` on a CPU: every part runs, errors end rows only, and a run goes on."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def words(out, *options):
    return [str(SCRIPT), "--device", "cpu", "--geometry", "tiny", "--out", str(out), *options]


def written(out):
    """Finished rows and page."""
    lines = (out / "gpu.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["status"] != "begun"], (out / "gpu.md").read_text()


def run(out, *options):
    """Rows and page of the script, run as from a bare checkout."""
    done = subprocess.run(
        [sys.executable, *words(out, *options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=out,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return written(out)


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """As `run`, in this process, where nothing has to be imported again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("no GPU was broken"))
    alarm = signal.getsignal(signal.SIGALRM)

    def call(*options):
        monkeypatch.setattr(sys, "argv", words(tmp_path, *options))
        monkeypatch.syspath_prepend(SCRIPT.parent)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return written(tmp_path)

    yield call
    signal.signal(signal.SIGALRM, alarm)


@pytest.mark.long
def test_every_part_runs_on_a_cpu(tmp_path):
    rows, page = run(tmp_path)

    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert parts == [
        "compress", "profile", "replay", "decode", "tests", "paged", "kernels", "same", "attention",
    ]  # fmt: skip
    failed = [row for row in rows if row["status"] != "ok"]
    assert not [row for row in failed if row["part"] not in ("paged", "tests")], failed
    assert all(f"## {part}" in page for part in parts)
    assert f"{len(rows)} of {len(rows)} rows" in page
    assert "CPU" in page
    assert "Host waits" in (tmp_path / "gpu-profile.txt").read_text()
    assert (tmp_path / "gpu-profile.json.gz").stat().st_size > 0


@pytest.mark.long
def test_what_serves_contexts_runs_interpreted(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows, _ = run(tmp_path, "--parts", "paged")

    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 3 + 4


def test_rows_that_do_not_fit_are_named_and_measured_by_the_next_call(run_here, tmp_path):
    labels = {"context": 128, "recipe": "gracekv-plus"}
    slow = {"run": "an earlier one", "part": "profile", "labels": labels, "status": "ok"}
    (tmp_path / "gpu.jsonl").write_text(json.dumps({**slow, "row s": 1e6}) + "\n")
    asked = ("--parts", "attention,profile", "--seconds", "1e5")

    rows, page = run_here(*asked)
    assert [row["part"] for row in rows[1:]] == ["attention"] * 4
    assert "4 of 5 rows" in page
    assert "\n- profile: 128 gracekv-plus\n" in page

    for _ in range(2):
        rows, page = run_here(*asked)
        assert [row["part"] for row in rows[1:]] == ["attention"] * 4 + ["profile"]
        assert "5 of 5 rows; 0 not ok" in page
        assert "Not measured yet" not in page


def test_a_row_that_is_cut_off_is_tried_once_more(run_here, tmp_path, monkeypatch):
    tried = []

    def overruns(*_, **__):
        tried.append(1)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr("gracekv.compress", overruns)
    for times in (1, 2, 2):
        _, page = run_here("--parts", "profile")
        assert len(tried) == times
        assert ("Not measured yet" in page) == (times == 1)
        # A process may be ended while it writes a line, too.
        with (tmp_path / "gpu.jsonl").open("a") as file:
            file.write('{"run": "')
    assert "cut off twice" in page


def test_an_error_ends_a_row_and_other_options_measure_anew(run_here, tmp_path):
    missing = str(tmp_path / "no weights here")
    rows, page = run_here("--parts", "decode", "--weights", missing)
    assert [row["status"][:6] for row in rows] == ["failed"] * 4
    assert "4 of 4 rows; 4 not ok" in page

    rows, page = run_here("--parts", "decode")
    assert [row["status"] for row in rows[4:]] == ["ok"] * 4
    assert "failed:" not in page
