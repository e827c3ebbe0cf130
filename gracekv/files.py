"""Reading and writing files: complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gracekv.errors import ConfigError

VERSION = "0.1.0"
"""Of gracekv; what is written says it."""


def read_text(path: Path) -> str:
    """The file as UTF-8; `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} as UTF-8 text: {error}.") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either complete or not there; makes its folder."""
    with replacing(path) as scratch:
        scratch.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it takes `path`'s place when the block ends well.

    Makes the folder. If the block raises, `path` is as it was and the other file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        # mkstemp makes files private; results are ordinary files.
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
