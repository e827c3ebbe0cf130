"""How many random inputs, a count of their outcomes, and the page of them.

Few by default; `GRACEKV_FUZZ=full` for all (`make test-long`). Each full test that passes replaces
its own line of the page, so that they can be run in parts.
"""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path

import torch

FULL = os.environ.get("GRACEKV_FUZZ") == "full"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "fuzz.md"
HEAD = """# Fuzz: broken files, headers and rows, random pipelines, interrupts

- machine: {machine}
- commit: {commit}
- `make test-long` (`GRACEKV_FUZZ=full`); in parts: `make test-long FUZZ="-k rows"`. Each part
  replaces its own lines; the line says of which commit.

| what | cases | outcomes | slowest, CPU seconds | minutes | commit |
|---|---:|---|---:|---:|---|
"""


class Tally:
    """Counts outcomes by kind, and the CPU seconds of the slowest case."""

    def __init__(self, name):
        self.name, self.outcomes, self.slowest, self.start = name, Counter(), 0.0, 0.0
        self.began = time.monotonic()

    def __enter__(self):
        self.start = time.process_time()
        return self

    def __exit__(self, *_):
        self.slowest = max(self.slowest, time.process_time() - self.start)

    def add(self, outcome):
        self.outcomes[outcome] += 1

    def counts(self):
        return ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))

    def line(self, commit):
        """The test's line of the page."""
        what = self.name.removeprefix("test_").replace("_", " ")
        minutes = (time.monotonic() - self.began) / 60
        return (
            f"| {what} | {self.outcomes.total():,} | {self.counts()} | {self.slowest:.2f} | "
            f"{minutes:.1f} | {commit} |"
        )


def write_line(tally, page=PAGE):
    """Put the test's line on the page, in the place of its earlier one."""
    # The page itself, which grows line by line, is no change of what was tested.
    names, others = ["git", "rev-parse", "--short", "HEAD"], [".", ":!benchmarks/results"]
    done = subprocess.run(names, capture_output=True, text=True, check=False, cwd=ROOT)
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *others], check=False, cwd=ROOT)
    commit = done.stdout.strip() + ("-dirty" if same.returncode else "")
    new = tally.line(commit)
    old = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    # Six columns; what earlier pages held had other ones.
    lines = [line for line in old if line.startswith("| ") and line.count(" |") == 6]
    lines = [
        line for line in lines if not line.startswith(("| what |", new[: new.index(" |") + 2]))
    ]
    facts = Path("/proc/cpuinfo")
    found = facts.read_text(encoding="utf-8") if facts.exists() else ""
    names = [x.partition(":")[2].strip() for x in found.splitlines() if x.startswith("model name")]
    machine = (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread(s); torch {torch.__version__}"
    )
    lines = sorted([*lines, new], key=lambda line: line.split(" |")[0])
    text = HEAD.format(machine=machine, commit=commit) + "\n".join(lines) + "\n"
    page.write_text(text, encoding="utf-8")
