"""The folder of a context: write it atomically, replace it, delete it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from gracekv.cache.entries import CompressedCache
from gracekv.cache.serialization import read_digest, write_cache
from gracekv.errors import StoreError
from gracekv.files import check_output, replacing
from gracekv.vllm.header import HEADER, ContextHeader, is_ours, is_served


def check_replaceable(folder: Path) -> None:
    """Raise `StoreError` if `folder` exists and is not a folder with files of exports only.

    `OutputError` if it does not exist and cannot be made.
    """
    if not os.path.lexists(folder):
        check_output(folder / HEADER)
        return
    if folder.is_symlink() or not folder.is_dir():
        raise StoreError(f"{folder} is not a folder, and is not replaced. Choose another name.")
    for path in folder.iterdir():
        if not is_ours(path.name) or path.is_symlink() or path.is_dir():
            raise StoreError(
                f"{folder} holds {path.name!r}, which no export wrote, and is not replaced. Choose "
                f"another name, or move it away."
            )


def write_context(
    rotated: CompressedCache, header_of: Callable[[str], ContextHeader], folder: Path
) -> ContextHeader:
    """Write a context atomically, replacing an existing one.

    Args:
        rotated: entries, with keys rotated as they are served.
        header_of: makes the header from the digest of the entries' file.
        folder: the context's folder.

    Returns:
        The header.

    Raises `StoreError` if `folder` holds other files, `OutputError` if writing fails.
    """
    check_replaceable(folder)
    with _alone_in(folder):
        try:
            # The new context takes effect when its header replaces the old one: each header names
            # its entries, and the old entries stay until then.
            with replacing(folder / HEADER) as header_file:
                entries, old = folder / "new.safetensors", folder / HEADER
                # Keep the old context's permissions.
                entries.touch(mode=old.stat().st_mode & 0o666 if old.exists() else 0o666)
                write_cache(entries, rotated, {"engine": "vllm"}, {})
                header = header_of(read_digest(entries))
                header_file.write_text(header.to_json(), encoding="utf-8")
                os.replace(entries, folder / header.entries_file)
        except BaseException:
            _delete(folder, lambda name: not is_served(name))
            raise
        _delete(folder, lambda name: name not in (HEADER, header.entries_file))
    return header


def delete_context(folder: Path) -> bool:
    """Delete a context's files, the header first; return whether there was a context.

    Raises `StoreError` if `folder` holds other files.
    """
    if not (folder / HEADER).is_file():
        return False
    check_replaceable(folder)
    with _alone_in(folder):
        (folder / HEADER).unlink(missing_ok=True)
        _delete(folder, is_ours)
    return True


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and lock it against other exports; remove it at the end if it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        # The lock ends with the process, however it ends, and leaves no file. Not on every system.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(handle)


def _delete(folder: Path, unneeded: Callable[[str], bool]) -> None:
    """Delete our files with unneeded names, also those of killed exports."""
    for path in folder.iterdir():
        if is_ours(path.name) and unneeded(path.name):
            path.unlink()


def files_state(folder: Path) -> object:
    """A value that changes when a file of the context changes; () if there are no files.

    Raises `StoreError` if one is not a regular file: links lead out of the store, pipes block.
    """
    try:
        with os.scandir(folder) as files:
            found = [(x.name, x.stat(follow_symlinks=False)) for x in files if is_served(x.name)]
    except OSError:
        return ()
    if not all(stat.S_ISREG(x.st_mode) for _, x in found):
        raise StoreError(f"Context {folder.name!r} holds links or devices. Use copies of files.")
    return sorted((n, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for n, x in found)


def is_of_system(error: BaseException | None) -> bool:
    """Whether a missing file, or one that cannot be opened, caused an error."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__
    return False
