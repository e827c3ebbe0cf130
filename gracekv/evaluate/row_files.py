"""Rows on disk: one JSON line each, complete or absent, in files that several processes may share.

A row is written by one system call and flushed to disk, so a killed process leaves at most one
incomplete line; readers ignore it and the next writer cuts it off, unless only the line break is
missing.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gracekv.errors import ConfigError, OutputError
from gracekv.files import lock

Row = dict[str, Any]

# The fields of a row that are read back, and their types.
_FIELDS: dict[str, Any] = {
    "key": str, "sample": str, "model": str, "dtype": str, "task": str, "group": str,
    "method": str, "column": str, "length": int | None, "seed": int, "index": int,
    "settings": dict, "versions": dict, "error": dict | None, "metric": str | None,
    "prompt_hash": str | None, "source": str | None, "marks": dict | None, "questions": list | None,
    "day": str | None,
}  # fmt: skip
# "full", "8x" or "512 entries".
_COLUMN = re.compile(r"full|\d+(\.\d+)?(e[+-]\d\d\d?)?(x| entries)")


class RowFile(AbstractContextManager["RowFile"]):
    """Appends rows to `folder`/rows-NAME.jsonl; rejects a second writer of the same file.

    A context manager. Raises `OutputError` if the file cannot be written, and `ConfigError` if
    another process has it open for writing.
    """

    def __init__(self, folder: Path, name: str = "main") -> None:
        self.path = folder / f"rows-{name}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # If an interrupt prevents `__exit__`, the file is closed when it is freed.
            self._file = io.FileIO(self.path, "a")
        except OSError as error:
            raise OutputError(
                f"Rows cannot be written to {self.path}: {error}. Give --out a folder that can be "
                f"written to."
            ) from error
        try:
            if not lock(self._file.fileno()):
                raise ConfigError(
                    f"Another process is writing {self.path}. Wait for it, give each process its "
                    f"own --shard, or use another folder."
                )
            data = self.path.read_bytes()
            if _is_whole(data[(end := data.rfind(b"\n") + 1) :]):
                self._file.write(b"\n")
            elif end < len(data):
                self._file.truncate(end)
        except BaseException as error:
            self._file.close()
            if not isinstance(error, OSError):
                raise
            raise OutputError(
                f"Rows cannot be added to {self.path}: {error}. Make room, or use another folder."
            ) from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; it is on the disk when this returns. `OutputError` if it cannot be."""
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        line = text.encode("utf-8", "replace")
        try:
            if (written := os.write(self._file.fileno(), line)) != len(line):
                # The disk is full: remove the partial line, so that the next is not appended to it.
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
                raise OSError(f"only {written} of {len(line)} bytes fit")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OutputError(
                f"A row could not be written to {self.path}: {error}. Earlier rows are complete: "
                f"free some space, and run the same again to continue."
            ) from error

    def __exit__(self, *_: object) -> None:
        # Unlocks it for other writers.
        self._file.close()


def read_rows(folder: str | Path) -> list[Row]:
    """All complete rows under `folder`, following links, file by file in order of their names.

    Raises `ConfigError` for a folder that does not exist or cannot be read, and for a complete line
    that is not a row: a field is missing, has the wrong type, or is NaN or infinite.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"There is no folder {folder}. Give the --out of an evaluation.")

    def fail(error: OSError) -> None:
        raise ConfigError(f"Cannot read the rows in {folder}: {error}.") from error

    files: dict[str, list[Path]] = {}
    for place, inner, names in os.walk(folder, onerror=fail, followlinks=True):
        paths = [Path(place, x) for x in names if x.startswith("rows-") and x.endswith(".jsonl")]
        # Links may lead to a folder that was read already, or form a cycle.
        if files.setdefault(os.path.realpath(place), paths) is not paths:
            inner.clear()
    rows: list[Row] = []
    for path in sorted(path for paths in files.values() for path in paths):
        try:
            # Not splitlines(): answers may hold other line separators.
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"Cannot read the rows in {path}: {error}.") from error
        for number, line in enumerate(lines if _is_whole(lines[-1]) else lines[:-1], 1):
            try:
                rows.append(_row(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"Line {number} of {path} is not a row ({error}). Restore the file or delete "
                    f"that line; its cell will then be run again."
                ) from error
    return rows


def _is_whole(line: bytes) -> bool:
    """Whether a file's last line, without a line break, is a row; a crash may leave part of one."""
    try:
        return bool(_row(line))
    except (ValueError, RecursionError):
        return False


def note_marks(row: Mapping[str, Any], first_marks: dict[tuple[str, str], Any]) -> None:
    """Record in `first_marks` the weights and tokenizer behind the model's name in a row.

    Raises `ConfigError` if an earlier row had others, since a table would average both. Rows
    without `marks`, of samples that could not be made, match any.
    """
    marks = row.get("marks") or {}
    other = first_marks.setdefault((row["model"], row["dtype"]), marks) if marks else {}
    if marks != other:
        names = sorted(n for n in {*marks, *other} if marks.get(n) != other.get(n))
        raise ConfigError(
            f"The folder holds rows of another model or tokenizer that was also called "
            f"{row['model']!r} (other {', '.join(names)}). Keep their rows in separate folders."
        )


def _row(line: bytes) -> Row:
    """The row in a line; raises `ValueError` that says what is wrong with it."""
    row = json.loads(line)
    # Rejects NaN, infinity, and text that cannot be encoded.
    json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    if not isinstance(row, dict):
        raise ValueError("it is not a mapping")
    row.setdefault("length", None)
    row.setdefault("error", None)
    for name, kind in _FIELDS.items():
        if not isinstance(row.get(name), kind) or isinstance(row.get(name), bool):
            raise ValueError(f"its {name!r} is {row.get(name)!r:.100}")
    error = row.get("error")
    texts = [row["settings"].get("protocol"), *row["versions"].values()]
    texts += [row.get("metric")] if error is None else [error.get("type"), error.get("message")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its protocol, versions, metric or error is not a string")
    if not all(isinstance(part, dict) for part in row.get("questions") or ()):
        raise ValueError("its 'questions' are not mappings")
    if not _COLUMN.fullmatch(row["column"]):
        raise ValueError(f"its 'column' is {row['column']!r:.100}")
    return row


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """One row for each key: results take precedence over failures, then later rows."""
    by_key: dict[str, Row] = {}
    for row in rows:
        old = by_key.get(row["key"])
        if old is None or old.get("error") is not None or row.get("error") is None:
            by_key[row["key"]] = row
    return by_key


def _finite(value: Any) -> Any:
    """Turn NaN and infinity, which JSON lacks, into strings, so that no average includes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
