"""The machine and the code behind a result page."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Not code: changes here affect no figure.
_NO_CODE = (":!benchmarks/results", ":!docs", ":!*.md")
# New files elsewhere, such as a log, affect none either.
_CODE = ("benchmarks/", "gracekv/", "tests/")


def changed() -> list[str]:
    """Files of code with uncommitted changes, including new files; none without git."""
    lines = _git("status", "--porcelain", "--untracked-files=all").splitlines()
    return [x[3:] for x in lines if not x.startswith("??") or x[3:].startswith(_CODE)]


def commit() -> str:
    """The last commit that changed code, with "-dirty" if files differ; "" without git.

    Commits of only results and pages do not count: their figures were measured at their parent.
    `SystemExit` if another gracekv than this checkout's would be measured.
    """
    spec = importlib.util.find_spec("gracekv")
    if spec and spec.origin and (home := Path(spec.origin).resolve().parents[1]) != ROOT:
        raise SystemExit(
            f"Python imports gracekv from {home}, so figures would not be those of the commit in "
            f"{ROOT}. Set PYTHONPATH={ROOT}."
        )
    found = _git("log", "-1", "--abbrev=7", "--format=%h").strip()
    return f"{found}-dirty" if found and changed() else found


def digest() -> str:
    """A digest of all code; it tells changed trees apart, also without git."""
    found = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _git(*words: str) -> str:
    # A benchmark that is stopped here must not leave a lock behind.
    command = ["git", "--no-optional-locks", *words, "--", ".", *_NO_CODE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout


def cpu() -> str:
    """The CPU's name as reported by Linux, else the architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> str:
    """Architecture and number of cores of the machine."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def threads() -> str:
    """`cores`, "CPU", and the number of threads that torch uses."""
    return f"{cores()}, CPU, {torch.get_num_threads()} thread(s)"


def versions() -> str:
    """Versions of torch, transformers and Python."""
    return (
        f"torch {torch.__version__}, transformers {version('transformers')}, "
        f"Python {platform.python_version()}"
    )
