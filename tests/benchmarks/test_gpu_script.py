"""`benchmarks/gpu.py` on a CPU: every part runs, errors and the deadline end rows, not the run."""

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
    return [str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out), *options]


def written(out):
    """Rows and page."""
    lines = (out / "gpu.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], (out / "gpu.md").read_text()


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

    parts = {row["part"] for row in rows}
    assert parts == {
        "machine", "kernels", "same", "replay", "compress", "decode", "attention", "profile",
        "paged", "tests",
    }  # fmt: skip
    failed = [row for row in rows if row["status"] != "ok"]
    assert not [row for row in failed if row["part"] not in ("paged", "tests")], failed
    assert all(f"## {part}" in page for part in parts - {"machine"})
    assert "CPU" in page


@pytest.mark.long
def test_what_serves_contexts_runs_interpreted(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows, _ = run(tmp_path, "--parts", "paged")

    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 1 + 3 + 4


def test_the_deadline_leaves_rows_out_and_the_page_is_written(run_here):
    rows, page = run_here("--minutes", "0.0000001", "--parts", "decode,profile")

    assert {row["status"] for row in rows if row["part"] != "machine"} == {"out of time"}
    assert "out of time" in page


def test_an_error_ends_a_row_and_rows_of_an_earlier_run_stay_with_resume(run_here, tmp_path):
    run_here("--parts", "attention")
    missing = tmp_path / "no weights here"
    rows, _ = run_here("--parts", "profile,attention", "--resume", "--weights", str(missing))

    parts = [row["part"] for row in rows]
    assert parts.count("attention") == 2 * 4
    assert [row["status"][:6] for row in rows if row["part"] == "profile"] == ["failed"]
