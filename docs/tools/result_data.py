"""Writes a result's tables as one CSV file and selects those that its section of the page shows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Longer tables are only linked.
LONGEST = 20
# Headings of single tasks are deeper than this.
DEEPEST = 2

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
# A program's output.
_OUTPUT = re.compile(r"^```\n.*?^```$", re.MULTILINE | re.DOTALL)
_MARKS = re.compile(r"\*\*|</?u>|`")
# "1,024", which CSV readers take for text.
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclass(frozen=True)
class Part:
    """The content under one heading of a result's file.

    Attributes:
        heading: its text; "" above the first one.
        level: the number of its "#".
        text: Markdown, up to the next heading.
    """

    heading: str
    level: int
    text: str

    @property
    def tables(self) -> list[list[list[str]]]:
        """Its tables as rows of cells without markup, column names first."""
        return [
            [
                [_MARKS.sub("", cell).strip() for cell in row.strip("|").split("|")]
                for number, row in enumerate(found[0].splitlines())
                if number != 1  # the alignment
            ]
            for found in _TABLE.finditer(self.text + "\n")
        ]

    @property
    def prose(self) -> str:
        """Its text without tables."""
        return _TABLE.sub("", self.text + "\n").strip()

    def shown(self, data: str, above: str = "##") -> str:
        """The text that the page shows, possibly "", with long tables replaced by links to `data`.

        Its heading goes one level below `above`.
        """
        if self.level > DEEPEST or not self.text:
            return ""

        def short(found: re.Match[str]) -> str:
            rows = found[0].count("\n") - 2
            if rows <= LONGEST:
                return found[0]
            return f"[A table of {rows} rows]({data}).\n"

        text = _OUTPUT.sub(f"[A profile]({data}).", _TABLE.sub(short, self.text + "\n")).strip()
        return f"{above}# {self.heading}\n\n{text}" if self.heading else text


def parts(body: str) -> list[Part]:
    """A file's text, cut at its headings; lines inside a program's output are not headings."""
    found, heading, level, lines, fenced = [], "", 0, [], False
    for line in [*body.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        if fenced or not re.match(r"#+ ", line):
            lines.append(line)
            continue
        found.append(Part(heading, level, "\n".join(lines).strip()))
        marks, _, heading = line.partition(" ")
        level, lines = len(marks), []
    return [part for part in found if part.heading or part.text]


def to_csv(title: str, notes: Sequence[str], found: Sequence[Part]) -> str:
    """All tables one below the other; the first column names the table, the others are shared.

    Lines that begin with "#" are the file's title and notes, and the text above a table.

    Raises:
        ValueError: if two columns of a table have the same name, since one would be lost.
    """
    heads = [[x or "row" for x in table[0]] for part in found for table in part.tables]
    for head in heads:
        if twice := {x for x in head if head.count(x) > 1}:
            raise ValueError(
                f"{title}: a table has two columns named {', '.join(sorted(twice))}. Give each "
                "its own name."
            )
    columns = dict.fromkeys(x for head in heads for x in head)
    out = io.StringIO()
    out.writelines(f"# {line}\n" for line in (title, *notes))
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["table", *columns])
    for part in found:
        out.writelines(f"# {line}\n" for line in part.prose.splitlines() if line)
        for head, *body in part.tables:
            for row in body:
                cells = dict(zip((x or "row" for x in head), map(_number, row), strict=True))
                rows.writerow([part.heading or title, *(cells.get(x, "") for x in columns)])
    return out.getvalue()


def _number(cell: str) -> str:
    """A number without commas; anything else unchanged."""
    return cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell
