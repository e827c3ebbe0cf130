"""Rows on disk: complete or absent, even if a writer is killed."""

import json
import os
from unittest.mock import Mock

import pytest

from gracekv.errors import ConfigError, OutputError
from gracekv.evaluate.row_files import RowFile, latest, read_rows
from support.evaluation_rows import row, written


def keyed(key, **fields):
    return {**row("ours", "2x", 0, 1.0), "key": key, **fields}


def test_rows_come_back_in_order(tmp_path):
    with RowFile(tmp_path) as file:
        for n in range(3):
            text = "line\u2028separator\nand ünïcode"
            # NaN and infinity are text, not zero.
            odd = {"values": [float("nan"), 1.0, float("inf")]}
            file.append(keyed(str(n), column="1e+100x", text=text, deep=odd))
    rows = read_rows(tmp_path)
    assert [row["key"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["text"] == text
    assert rows[0]["deep"]["values"] == ["nan", 1.0, "inf"]


def test_linked_folders_are_read_once_and_none_is_left_out(tmp_path, monkeypatch):
    far, runs = (written(tmp_path / name, [keyed(name)]) for name in ("far", "runs"))
    for name, target in (("shard", far), ("again", far), ("circle", runs)):
        (runs / name).symlink_to(target)
    assert sorted(row["key"] for row in read_rows(runs)) == ["far", "runs"]
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError("denied")))
    with pytest.raises(ConfigError, match=r"Cannot read the rows in .*runs: denied"):
        read_rows(runs)


LAST_LINES = [
    lambda text: text + b'{"key": "to',
    lambda text: text[:-1],  # as some editors leave it
]


@pytest.mark.parametrize("change", LAST_LINES, ids=["torn", "without its end"])
def test_a_torn_last_line_is_cut_off_and_a_whole_one_counts_without_its_end(tmp_path, change):
    path = written(tmp_path, [keyed("a"), keyed("b")]) / "rows-main.jsonl"
    path.write_bytes(change(path.read_bytes()))
    assert [row["key"] for row in read_rows(tmp_path)] == ["a", "b"]
    with RowFile(tmp_path) as file:
        file.append(keyed("next"))
    assert [row["key"] for row in read_rows(tmp_path)] == ["a", "b", "next"]
    assert path.read_bytes().count(b"\n") == 3


def test_a_second_writer_of_one_file_is_refused(tmp_path, monkeypatch):
    with RowFile(tmp_path):
        with pytest.raises(ConfigError, match="Another process is writing"):
            RowFile(tmp_path)
        with RowFile(tmp_path, "1of2") as other:
            other.append(keyed("b"))
    with RowFile(tmp_path) as again:
        again.append(keyed("a"))
    assert {row["key"] for row in read_rows(tmp_path)} == {"a", "b"}
    # Not every file system has locks.
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError("No locks available")))
    RowFile(tmp_path).__exit__()


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    real = os.write
    with RowFile(tmp_path) as file:
        file.append(keyed("a"))
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:5]))
        with pytest.raises(OutputError, match=r"only 5 of .* complete"):
            file.append(keyed("b"))
        monkeypatch.setattr(os, "write", real)
        file.append(keyed("c"))
    assert [row["key"] for row in read_rows(tmp_path)] == ["a", "c"]


NO_ROWS = [
    ("not json", "Expecting value"),
    ("[1]", "not a mapping"),
    ('{"no": "key"}', "'key' is None"),
    ("[" * 100_000, "recursion"),
    ('{"key": "\\ud800"}', "surrogates"),
    (json.dumps(keyed("a", seed=True)), "'seed' is True"),
    (json.dumps(keyed("a", length="1024")), "'length' is '1024'"),
    (json.dumps(keyed("a", column="fast")), "'column' is 'fast'"),
    (json.dumps(keyed("a", column="1e999x")), "'column'"),
    (json.dumps(keyed("a", settings={})), "error is not a string"),
    (json.dumps(keyed("a", versions={"torch": 2})), "error is not a string"),
    (json.dumps(keyed("a", error={"type": "X"})), "error is not a string"),
    (json.dumps(keyed("a", metric=None)), "error is not a string"),
    (json.dumps(keyed("a", questions=[3])), "not mappings"),
    (json.dumps(keyed("a", score=float("nan"))), "not JSON compliant"),
]


@pytest.mark.parametrize(("line", "why"), NO_ROWS)
def test_a_complete_line_that_is_no_row_is_an_error(tmp_path, line, why):
    path = written(tmp_path, [keyed("whole")]) / "rows-main.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ConfigError, match=rf"(?s)Line 2 of .*rows-main.jsonl is not a row .*{why}"):
        read_rows(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "rows-main.jsonl").mkdir(parents=True)
    for folder in ("file", "file/below", "folder"):
        with pytest.raises(OutputError, match=r"Rows cannot be written to .*--out"):
            RowFile(tmp_path / folder)


def test_a_missing_folder_is_an_error(tmp_path):
    for name in ("none", "a name that is too long" * 20):
        with pytest.raises(ConfigError, match="There is no folder"):
            read_rows(tmp_path / name)


def test_a_result_replaces_a_failure_and_not_the_other_way_round():
    good, bad = {"key": "a", "error": None}, {"key": "a", "error": {"type": "X"}}
    assert latest([bad, good])["a"] is good
    assert latest([good, bad])["a"] is good
