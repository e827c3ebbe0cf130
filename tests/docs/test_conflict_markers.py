"""No file is committed in the middle of a merge."""

import re
import subprocess

import pytest
from page_blocks import ROOT

MARKER = re.compile(r"^(?:(?:<{7}|>{7}|\|{7})(?: |$)|={7}$)", re.MULTILINE)


def test_no_tracked_file_has_conflict_markers():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    argv = ["git", "ls-files", "-z", "*.md", "*.py"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    assert paths
    assert [x for x in paths if x.exists() and MARKER.search(x.read_text(encoding="utf-8"))] == []


def test_each_marker_is_found():
    for mark in ("<" * 7 + " HEAD", "|" * 7 + " base", "=" * 7, ">" * 7 + " theirs"):
        assert MARKER.search(f"before\n{mark}\nafter\n")
