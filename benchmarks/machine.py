"""What a result page says of the machine and the code it was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def commit() -> str:
    """`git describe` of this checkout; "" where there is no git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except OSError:
        return ""
    return found.stdout.strip()


def cpu() -> str:
    """The CPU's name as Linux tells it, else the architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> str:
    """Architecture and number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def threads() -> str:
    """`cores`, a CPU's, and how many threads torch uses."""
    return f"{cores()}, CPU, {torch.get_num_threads()} thread(s)"


def versions() -> str:
    """Of torch, transformers and Python."""
    return (
        f"torch {torch.__version__}, transformers {version('transformers')}, "
        f"Python {platform.python_version()}"
    )
