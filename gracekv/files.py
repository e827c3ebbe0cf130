"""Reading and writing files: complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gracekv.errors import ConfigError


def read_text(path: Path) -> str:
    """The file as UTF-8; `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} as UTF-8 text: {error}.") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either complete or not there; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files private; results are ordinary files.
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
