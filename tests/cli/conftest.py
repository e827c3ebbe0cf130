"""The command line in this process, and a text for it."""

import sys

import pytest

from gracekv.cli.main import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["gracekv", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            main()
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, shown.err

    return run


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Once “upon” a time.", encoding="utf-8")
    return path
