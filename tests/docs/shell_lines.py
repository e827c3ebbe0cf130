"""Command lines of the pages: ours run in this process, others are checked statically."""

import io
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from page_blocks import ROOT

from gracekv.cli.main import main

# Commands on pages that are not run here, with the reason.
NOT_RUN = {
    "torchrun": "starts processes of its own: tests/docs/test_torchrun.py runs the guide's, and "
    "tests/evaluate the variables that it sets",
    "vllm": "needs an environment of its own; tests/vllm starts the same server there",
    "curl": "asks that server; tests/vllm sends it the same request",
}


def check(words, place, history):
    """Run or check one command; `history` holds the page's earlier `gracekv` commands."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]  # an environment variable for this command
    tool = words[0]
    if tool == "gracekv":
        _gracekv(words[1:], place, history)
    elif tool == "make":
        _make(words[1:], place)
    elif words[:2] == ["pip", "install"]:
        _pip(words[2:], place)
    elif words[:2] == ["python", "-m"]:
        found = ROOT.joinpath(*words[2].split("."), "__main__.py")
        assert found.is_file(), f"{place}: there is no {found}"
    elif tool == "python":
        _python(words[1:], place)
    elif tool == "mkdir":
        Path(words[-1]).mkdir(exist_ok="-p" in words)
    else:
        assert tool in NOT_RUN, f"{place}: nothing checks {tool!r}; give it a check or a reason"


def _gracekv(words, place, history):
    if "..." in words:
        # The dots stand for the arguments of the page's last command of that name.
        earlier = [old for old in history if old[0] == words[0]]
        assert earlier, f"{place}: no earlier 'gracekv {words[0]}' for the dots to stand for"
        at = words.index("...")
        words = [*words[:at], *earlier[-1][1:], *words[at + 1 :]]
    history.append(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gracekv", *words])
        patch.setattr(sys, "stdin", io.StringIO("Who is Dinah?\n"))  # for gracekv chat
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"{place}: gracekv {shlex.join(words)} ended with an error"


def _make(words, place):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert word in targets, f"{place}: the Makefile has no target {word!r}"


def _pip(words, place):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    rest = iter(words)
    for word in rest:
        if word in ("-c", "-r"):
            assert (ROOT / next(rest)).is_file(), f"{place}: there is no such file"
        elif word.startswith("-"):
            known = ("-e", "--no-deps", "--require-hashes", "-q", "-U")
            assert word in known, f"{place}: unexpected {word}"
        elif found := re.fullmatch(r"(?:\.|gracekv)(?:\[([\w,-]+)\])?", word):
            for extra in (found[1] or "").split(","):
                known = ["", *project["optional-dependencies"]]
                assert extra in known, f"{place}: there is no extra {extra!r}"
        else:
            assert word in pins.split(), f"{place}: {word} is pinned nowhere in the repository"


def _python(words, place):
    path = ROOT / words[0]
    assert path.is_file(), f"{place}: there is no {words[0]}"
    text = path.read_text()
    for word in words[1:]:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{place}: {words[0]} takes no {word}"
