"""Rows on disk: whole or absent, whoever dies while writing."""

import json
import os

import pytest

from gracekv.errors import ConfigError
from gracekv.evaluate.row_files import RowFile, latest, read_rows


def test_rows_come_back_in_order(tmp_path):
    with RowFile(tmp_path) as file:
        for n in range(3):
            file.append({"key": str(n), "text": "line\u2028separator\nand ünïcode"})
    rows = read_rows(tmp_path)
    assert [row["key"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["text"] == "line\u2028separator\nand ünïcode"


def test_a_torn_line_is_ignored_and_then_cut_off(tmp_path):
    with RowFile(tmp_path) as file:
        file.append({"key": "whole"})
    path = tmp_path / "rows-main.jsonl"
    with path.open("ab") as file:
        file.write(b'{"key": "to')
    assert [row["key"] for row in read_rows(tmp_path)] == ["whole"]
    with RowFile(tmp_path) as file:
        file.append({"key": "next"})
    assert [row["key"] for row in read_rows(tmp_path)] == ["whole", "next"]
    assert path.read_bytes().count(b"\n") == 2


def test_a_second_writer_of_one_file_is_refused(tmp_path):
    with RowFile(tmp_path):
        with pytest.raises(ConfigError, match="Another process is writing"):
            RowFile(tmp_path)
        with RowFile(tmp_path, "1of2") as other:
            other.append({"key": "b"})
    with RowFile(tmp_path) as again:
        again.append({"key": "a"})
    assert {row["key"] for row in read_rows(tmp_path)} == {"a", "b"}


def test_nan_is_text_and_not_zero(tmp_path):
    with RowFile(tmp_path) as file:
        file.append({"key": "a", "deep": {"values": [float("nan"), 1.0, float("inf")]}})
    (row,) = read_rows(tmp_path)
    assert row["deep"]["values"] == ["nan", 1.0, "inf"]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    real = os.write
    with RowFile(tmp_path) as file:
        file.append({"key": "a"})
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:5]))
        with pytest.raises(OSError, match="Only 5 of"):
            file.append({"key": "b"})
        monkeypatch.setattr(os, "write", real)
        file.append({"key": "c"})
    assert [row["key"] for row in read_rows(tmp_path)] == ["a", "c"]


@pytest.mark.parametrize("line", ["not json", "[1]", json.dumps({"no": "key"})])
def test_a_complete_line_that_is_no_row_is_an_error(tmp_path, line):
    (tmp_path / "rows-main.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"Line 1 of .* is not a row"):
        read_rows(tmp_path)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="There is no folder"):
        read_rows(tmp_path / "none")


def test_a_result_replaces_a_failure_and_not_the_other_way_round():
    good, bad = {"key": "a", "error": None}, {"key": "a", "error": {"type": "X"}}
    assert latest([bad, good])["a"] is good
    assert latest([good, bad])["a"] is good
