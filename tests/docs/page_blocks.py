"""The fenced code blocks of a page."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: path of the page inside the repository.
        line: line of its first line of code, from 1.
        language: the word after the fence, or "".
        title: the name that the page gives the block's file, or None.
        code: without the indentation of its fence.
    """

    page: str
    line: int
    language: str
    title: str | None
    code: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def pages():
    """Every handwritten page of the site, and the other files with code blocks."""
    hidden = {"tools", "figures", "assets"}
    docs = sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name not in hidden)
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *docs]


def blocks(path):
    """The blocks of a page in order; an unclosed fence is an error."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    found, lines = [], path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if not opened:
            continue
        indent, ticks = len(opened["indent"]), opened["ticks"]
        first, code = number + 1, []
        while number < len(lines) and lines[number].strip() != ticks:
            code.append(lines[number][indent:])
            number += 1
        assert number < len(lines), f"{name}:{first}: the block is never closed"
        number += 1
        language, _, rest = opened["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        found.append(Block(name, first, language, title and title[1], "\n".join(code) + "\n"))
    return found


def commands(code):
    """The commands of a shell block, each as its words; comments and prompts are removed."""
    found = []
    for line in re.sub(r"\\\n", " ", code).splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while "&&" in words:
            at = words.index("&&")
            found.append(words[:at])
            words = words[at + 1 :]
        found.append(words)
    return [words for words in found if words]
