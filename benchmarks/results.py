"""Measure all published figures at one commit, on one machine: `make results`.

    python benchmarks/results.py --data FOLDER     # $GRACEKV_EVAL_DATA by default
    python benchmarks/results.py --plan            # parts, minutes and outcomes

**What.** `results_plan.PARTS`, in this order: quality with the question seen and not seen, answers,
bits at equal bytes, 10x to 50x, ablations and the fit, long outputs, memory, construction,
decoding, the cost of a limit, passages, ten questions, and three measurements of vLLM. A part is a
few benchmark commands; sizes are chosen so that all parts take three to five hours on two cores.
Each part is stopped when its minutes are over. Quality and memory run as two single-threaded
processes; timings run one after the other, with the machine to themselves.

**How.** A tree with uncommitted code is refused. The run belongs to the last commit that changed
code; at another commit it starts over. Finished parts are not repeated, interrupted ones resume,
failed ones are shown as failed on the page, and the others continue (`results_run`). Rows are in
runs/results, pages and the state in benchmarks/results. Every page gives machine, commit, versions
and settings.

**Afterwards.** `docs/results.md` and its figures are regenerated. Commit only benchmarks/results
and docs: the pages then name the commit of the code, their parent.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import machine
from results_plan import MOST_MINUTES, OUTSIDE, PARTS
from results_run import ROOT, Run, State

RESULTS = Path(__file__).parent / "results"
AFTER = ("docs/tools/results.py", "docs/figures/all.py")


def check(data: str | None, results: Path = RESULTS) -> Path:
    """The data folder; `SystemExit` with the reason if nothing can be measured."""
    if changed := machine.changed():
        raise SystemExit(
            "Results belong to a commit, and these files have uncommitted changes: "
            f"{', '.join(changed)}. Commit them, or set them aside with git stash -u."
        )
    if not machine.commit():
        raise SystemExit("Results belong to a commit; this is not a git checkout.")
    folder = Path(data).resolve() if data else None
    needed = ("essays", "qa", "longbench", "longproc")
    if folder is None or not all((folder / name).is_dir() for name in needed):
        raise SystemExit(
            f"Give --data a folder with essays/, qa/, longbench/ and longproc/, or name it in "
            f"GRACEKV_EVAL_DATA; got {data!r}. docs/evaluation.md describes them."
        )
    unknown = strays(results)
    if unknown:
        raise SystemExit(
            f"No part makes {', '.join(unknown)} in benchmarks/results. Delete them, or add a part "
            f"to benchmarks/results_plan.py: they would stay as figures of another commit."
        )
    return folder


def strays(results: Path) -> list[str]:
    """Result files that no part makes."""
    known = {*OUTSIDE, *(name for part in PARTS for name in part.outputs)}
    names = {f"{name}{suffix}" for name in known for suffix in (".md", ".png")}
    names |= {"run.json", "test-long.md"}
    return sorted(path.name for path in results.iterdir() if path.name not in names)


def plan(state: State | None) -> str:
    """The parts as lines of text."""
    known = state.parts if state else {}
    lines = [f"{sum(part.minutes for part in PARTS)} of {MOST_MINUTES} minutes"]
    for part in PARTS:
        outcome = known.get(part.name)
        told = "" if outcome is None else f"{outcome.state}, {outcome.minutes:.1f} {outcome.why}"
        lines.append(f"{part.name:18} {part.minutes:3} min  {part.question:64} {told}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("GRACEKV_EVAL_DATA"), metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--plan", action="store_true", help="only show the parts")
    args = parser.parse_args()
    if args.plan:
        print(plan(State.read(RESULTS / "run.json")))
        return
    data = check(args.data)
    # So that child processes stop, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit("Stopped; run it again to go on."))
    state = Run(PARTS, RESULTS, ROOT / "runs" / "results", data, args.vllm.absolute()).all()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    after = {
        script: subprocess.run([sys.executable, script], check=False, cwd=ROOT, env=environment)
        for script in AFTER
    }
    print(plan(state))
    failed = [name for name, outcome in state.parts.items() if outcome.state == "failed"]
    failed += [script for script, done in after.items() if done.returncode]
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}. Logs: runs/results. Run it again to retry.")


if __name__ == "__main__":
    main()
