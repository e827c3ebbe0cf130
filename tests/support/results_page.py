"""Pages of benchmarks/results whose lines are replaced one by one, to allow partial runs."""

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The checkout's commit, with "-dirty" if anything but the results differs."""
    # The pages themselves, which grow line by line, do not change the tested code.
    names, others = ["git", "rev-parse", "--short", "HEAD"], [".", ":!benchmarks/results"]
    done = subprocess.run(names, capture_output=True, text=True, check=False, cwd=ROOT)
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *others], check=False, cwd=ROOT)
    return done.stdout.strip() + ("-dirty" if same.returncode else "")


def machine() -> str:
    """Processor, its cores, torch's threads and version."""
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(encoding="utf-8") if facts.exists() else ""
    names = [x.partition(":")[2].strip() for x in text.splitlines() if x.startswith("model name")]
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread(s); torch {torch.__version__}"
    )


def replace_lines(page: Path, head: str, new: Iterable[str]) -> None:
    """Put lines on `page`, each replacing the one with the same first cell, in order.

    Args:
        head: text above the lines, with the table's head; {machine} and {commit} are filled in.
        new: lines of the table.
    """
    old = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    title, columns = head.splitlines()[-2], head.splitlines()[-2].count(" |")
    # Lines of earlier pages had other columns.
    table = [x for x in old if x.startswith("| ") and x.count(" |") == columns and x != title]
    lines = {_cell(x): x for x in table}
    lines |= {_cell(line): line for line in new}
    text = head.format(machine=machine(), commit=commit())
    page.write_text(text + "".join(f"{lines[x]}\n" for x in sorted(lines)), encoding="utf-8")


def _cell(line: str) -> str:
    return line.split(" |")[0]
