"""Python in a fresh process."""

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess, run
from typing import Any


def fresh_python(
    *argv: Any, cwd: Path | None = None, status: int | None = 0, **variables: str
) -> CompletedProcess[str]:
    """The ended process, its output as text; `variables` are added to its environment.

    It must end with `status`; None allows any.
    """
    command, env = [sys.executable, *map(str, argv)], os.environ | variables
    done = run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert status in (None, done.returncode), (done.stdout + done.stderr)[-3000:]
    return done
