"""The command line in a wide terminal, and a text for it."""

import pytest


@pytest.fixture
def cli(cli, monkeypatch):
    """In a wide terminal, also for commands run by `refused`."""
    monkeypatch.setenv("COLUMNS", "200")
    return cli


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Once “upon” a time.", encoding="utf-8-sig")  # as Windows writes it
    return path
