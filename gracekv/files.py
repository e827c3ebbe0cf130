"""Read files, and write them completely or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gracekv.errors import ConfigError, OutputError, expect

VERSION = "0.3.0"
"""gracekv's version, recorded in every file that it writes."""


def path_of(path: str | os.PathLike[str]) -> Path:
    """`path` as a `Path`; raises `ConfigError` if it is not a path."""
    expect(path, str | os.PathLike, "A file name is a string or a pathlib.Path")
    return Path(path)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} as UTF-8 text: {error}.") from error


def check_output(path: Path) -> None:
    """Make the folder of `path`; raise `OutputError` if `replacing` could not write to `path`.

    Call it before long work.
    """
    try:
        target = Path(os.path.realpath(path))
        # `Path.exists` hides other errors since Python 3.14.
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise OutputError(f"Cannot write to {str(path)!r}: {reason}. Name another file.") from error
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "not a regular file"
        raise OutputError(f"Cannot write to {path}: it is {kind}. Name a file.")
    folder = next((x for x in target.parents if x.exists()), Path(target.anchor))
    # Permissions are not enough: /proc, for example, refuses new folders even from root.
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent
    if folder != target.parent or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"Cannot write to {path}: {folder} is not a folder that this process may write to. "
            f"Name a file elsewhere."
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; makes its folder."""
    with replacing(path) as scratch:
        scratch.write_bytes(data)


def lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder; return False if another process has locked it.

    The lock ends with the process, however that ends, and leaves no file. Without Unix or file
    locks this does nothing: users must avoid two writers themselves.

    Args:
        handle: descriptor of the file or folder.
        wait: whether to wait for the other process.
    """
    with suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file next to `path`, which replaces it if the block succeeds.

    Makes the folder. If the block raises, `path` is unchanged and the other file is removed.
    Permissions are those of the replaced file; a new file follows the umask. If `path` is a link,
    its target is replaced.

    Raises `OutputError` if `path` is a folder, a device or a pipe, or if writing fails.
    """
    check_output(path)
    target = Path(os.path.realpath(path))
    # A file name has at most 255 bytes, and a character may take four.
    scratch = target.with_name(f".{target.name[:50]}-{os.urandom(6).hex()}")
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        # Even while it is written, its permissions are no wider than those of the file that it
        # will replace, except that its owner may write.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        os.close(os.open(scratch, flags, 0o666 if mode is None else mode & 0o666 | 0o200))
        try:
            mode = stat.S_IMODE(scratch.stat().st_mode) if mode is None else mode
            yield scratch
            # The block may have put another file there.
            os.chmod(scratch, mode)
            os.replace(scratch, target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
    except OSError as error:
        # The system's error names the scratch file.
        raise OutputError(
            f"Cannot write to {path}: {error.strerror or error}. The old file is unchanged. "
            f"Name a file in a folder that can be written to and has room."
        ) from error
