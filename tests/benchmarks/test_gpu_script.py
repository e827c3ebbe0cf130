"""`benchmarks/gpu.py` on a CPU: every part runs, an error ends only its row, and runs resume."""

import json
from pathlib import Path

import pytest

from support.fresh_python import fresh_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(out, *options):
    """Finished rows and page of the script, run as from a bare checkout."""
    always = ["--device", "cpu", "--geometry", "tiny", "--out", out]
    fresh_python(SCRIPT, *always, *options, cwd=out, OMP_NUM_THREADS="1")
    lines = (out / "gpu.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["status"] != "begun"], (out / "gpu.md").read_text()


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
