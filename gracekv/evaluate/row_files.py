"""Rows on disk: one JSON line each, whole or absent, in files that several processes may share.

A row is written by one system call and flushed to the disk, so a killed process leaves at most one
line without its end; readers ignore it and the next writer cuts it off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gracekv.errors import ConfigError

Row = dict[str, Any]


class RowFile:
    """Appends rows to `folder`/rows-NAME.jsonl; a second writer of the same file is refused.

    A context manager. Raises `ConfigError` if another process has the file open for writing.
    """

    def __init__(self, folder: Path, name: str = "main") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rows-{name}.jsonl"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._cut_torn_line()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; it is on the disk when this returns."""
        line = (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written != len(line):
            # A full disk: take the half line back, so that the next one is not glued to it.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"Only {written} of {len(line)} bytes fit into {self.path}.")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, which unlocks it for other writers."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not a Unix: two writers are then the user's to avoid
            return
        try:
            # Ends with the process, however it ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another process is writing {self.path}. Wait for it, give each process its own "
                f"--shard, or use another folder."
            ) from error

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.ftruncate(self._file, end)


def read_rows(folder: Path) -> list[Row]:
    """All complete rows under `folder`, file by file in order of their names.

    Raises `ConfigError` for a folder that does not exist and for a complete line that is no row.
    """
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Give the --out of an evaluation.")
    rows: list[Row] = []
    for path in sorted(folder.rglob("rows-*.jsonl")):
        # Not splitlines(): answers may hold other line separators.
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                row["key"]
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"Line {number} of {path} is not a row ({error}). Restore the file or delete "
                    f"that line; its cell will then be run again."
                ) from error
            rows.append(row)
    return rows


def latest(rows: list[Row]) -> dict[str, Row]:
    """One row for each key: a result before a failure, and else the last written."""
    found: dict[str, Row] = {}
    for row in rows:
        before = found.get(row["key"])
        if before is None or before.get("error") is not None or row.get("error") is None:
            found[row["key"]] = row
    return found


def _finite(value: Any) -> Any:
    """NaN and infinity, which JSON lacks, become texts, so that no average includes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
