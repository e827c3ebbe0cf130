"""`.ci/run` with a `make` that does nothing: what runs, what is said and how it ends."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"
# Each target prints and does what its variable says.
MAKE = """#!/bin/bash
for word in "$@"; do case $word in
kernels | lowest | test | vllm-environment | test-vllm)
	echo "$word" >>"$ROOT/made"
	name=${word//-/_}
	eval "${!name:-true}" ;;
VLLM_TESTS=* | AFTER_LOWEST=1) echo "$word" >>"$ROOT/made" ;;
esac; done
"""
REST = "5 passed, 1 skipped in 3.00s"
LOWEST = "4 passed in 1.00s"
ALL = f"{REST}; oldest instruction sets: {LOWEST}"
BEGUN = "until [ -e $ROOT/begun ]; do sleep 0.05; done"


@pytest.fixture
def run(tmp_path):
    if os.name != "posix" or not shutil.which("bash") or not shutil.which("timeout"):
        pytest.skip("needs bash and timeout")
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    kept = {name: x for name, x in os.environ.items() if not name.startswith("GRACEKV_")}

    def call(**variables):
        (tmp_path / "made").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=tmp_path,
            env=kept
            | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ROOT": str(tmp_path)}
            | {"test": f"echo '{REST}'", "test_vllm": "echo '2 passed in 1.00s'"}
            | {"lowest": f"echo '{LOWEST}'"}
            | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        made = (tmp_path / "made").read_text().split("\n")
        return done, made, (done.stdout.splitlines() or [""])[-1]

    return call


def test_the_proofs_run_beside_everything(run):
    # Neither side ends before it has seen the other one.
    done, made, last = run(
        lowest=f"{BEGUN}; touch $ROOT/others; echo '{LOWEST}'",
        test_vllm="touch $ROOT/begun; until [ -e $ROOT/others ]; do sleep 0.05; done; "
        "echo '2 passed in 1.00s'",
    )
    assert done.returncode == 0, done.stderr
    assert last == f"{ALL}; vLLM: 2 passed in 1.00s"
    assert done.stdout.splitlines()[-2] == "2 passed in 1.00s", "the log comes at the end"
    assert "NOT RUN" not in done.stderr
    (options,) = [name for name in made if name.startswith("VLLM_TESTS")]
    assert options.startswith("VLLM_TESTS=-x")
    assert [x for x in made if x in ("kernels", "lowest", "test")] == ["kernels", "lowest", "test"]
    assert "AFTER_LOWEST=1" in made, "what the oldest instruction sets ran is not run again"
    assert made.index("vllm-environment") < made.index("test-vllm")
    assert made.index("kernels") < made.index("test-vllm")


def test_all_of_them_or_none_if_asked(run):
    done, made, last = run(GRACEKV_TEST_VLLM="1", GRACEKV_CI_SECONDS="0")
    assert done.returncode == 0, done.stderr
    assert last.endswith("vLLM: 2 passed in 1.00s")
    assert not any(name.startswith("VLLM_TESTS") for name in made)
    done, *_ = run(GRACEKV_TEST_VLLM="1", vllm_environment="false")
    assert done.returncode == 1
    done, _, last = run(GRACEKV_TEST_VLLM="0", vllm_environment="echo bad >$ROOT/installed")
    assert (done.returncode, last) == (0, f"{ALL}; vLLM: NOT RUN")
    assert "NOT RUN: the tests against a real vLLM, GRACEKV_TEST_VLLM=0." in done.stderr


@pytest.mark.parametrize(
    ("said", "variables"),
    [
        ("cannot be installed: no network", {"vllm_environment": "echo no network; false"}),
        ("was not installed after", {"vllm_environment": "sleep 60", "GRACEKV_CI_SECONDS": "0"}),
        (
            "stopped",
            {
                "test_vllm": "touch $ROOT/begun; sleep 60",
                "lowest": f"{BEGUN}; echo '{LOWEST}'",
                "GRACEKV_CI_SECONDS": "0",
            },
        ),
    ],
)
def test_what_is_missing_or_slow_is_said_loudly_and_fails_nothing(run, said, variables):
    done, _, last = run(**variables)
    assert (done.returncode, last) == (0, f"{ALL}; vLLM: NOT RUN"), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "NOT RUN" in line]
    assert said in line


def test_proofs_that_ended_count_however_long_the_others_took(run):
    done, _, last = run(
        test_vllm="echo '2 passed in 1.00s'; touch $ROOT/begun",
        test=f"{BEGUN}; sleep 1; echo '{REST}'",
        GRACEKV_CI_SECONDS="0",
    )
    assert (done.returncode, last) == (0, f"{ALL}; vLLM: 2 passed in 1.00s"), done.stderr


def test_a_failing_test_fails_all(run):
    failed = "echo '1 failed, 1 passed in 1.00s'; exit 2"
    done, _, last = run(test_vllm=failed)
    assert (done.returncode, last) == (1, f"{ALL}; vLLM: 1 failed, 1 passed in 1.00s")
    done, *_ = run(test=failed)
    assert done.returncode != 0
    assert "vLLM:" not in done.stdout


WAITS = 'trap "touch $ROOT/ended; exit 1" TERM; touch $ROOT/begun; sleep 60 & wait'


@pytest.mark.parametrize("part", ["vllm_environment", "test_vllm"])
@pytest.mark.parametrize("ending", ["false", "kill -TERM $PPID; sleep 0.2"])
def test_what_runs_beside_ends_with_the_run(run, tmp_path, part, ending):
    done, *_ = run(**{part: WAITS, "lowest": f"{BEGUN}; {ending}"})
    assert done.returncode != 0
    for _ in range(200):
        if (tmp_path / "ended").exists():
            return
        time.sleep(0.05)
    pytest.fail("it still runs")
