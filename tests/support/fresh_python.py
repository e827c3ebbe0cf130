"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def fresh_python(
    *argv: Any, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The ended process, its output as text; `variables` are added to its environment."""
    return subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, check=False, cwd=cwd,
        env=os.environ | variables,
    )  # fmt: skip
