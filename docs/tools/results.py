"""The results page, made from the tables and plots in benchmarks/results.

    python docs/tools/results.py

Every file there becomes a section with its plots: evaluations first, then those that `KNOWN` does
not name, then timings. A result must say where it was measured: "- machine: ..." and
"- commit: ..." above its tables. A section has means, standings and short tables; every table of
the file, those of single tasks among them, is in the section's data file (`result_data`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from result_data import parts, to_csv

from gracekv.files import write_atomically

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
ASSETS = ROOT / "docs" / "assets" / "results"

_INTRO = (
    "<!-- Written by docs/tools/results.py from benchmarks/results; change those. -->\n\n"
    "# Results\n\n"
    "What was measured, where, and by which command. Nothing here is typed by hand: "
    "`make results-page` writes this page from the files in `benchmarks/results/`, and a test "
    "fails if it is out of date. What the figures mean for you is under "
    "[Keeping the answers](quality.md) and [Limits and failure cases](limits.md).\n\n"
    "A section shows means, standings and short tables. **All tables** leads to everything that "
    "was measured, task by task and with intervals in brackets: one CSV file a result, whose head "
    'says machine, commit and settings (`pandas.read_csv(path, comment="#")`).\n'
)


@dataclass(frozen=True)
class Known:
    """What the page says of a result beyond its file.

    Attributes:
        command: what measures it again.
        page: another page that says what its tables mean.
        tables: whether they are shown here, not on that page alone.
        figure: name of what docs/figures draws of it, or None.
        alt: what that figure shows, in words.
    """

    command: str
    page: str | None = None
    tables: bool = True
    figure: str | None = None
    alt: str = ""


KNOWN = {
    "smollm2-default": Known(
        "gracekv evaluate --config benchmarks/smollm2_default.yaml --out runs/default",
        page="quality.md",
    ),
    "smollm2": Known(
        "gracekv evaluate --config benchmarks/smollm2_suite.yaml --out runs/smollm2",
        page="quality.md",
    ),
    "smollm2-agnostic": Known(
        "gracekv evaluate --config benchmarks/smollm2_agnostic.yaml --out runs/agnostic",
        page="quality.md",
    ),
    "fit": Known(
        "python benchmarks/compare_runs.py BEFORE:gracekv-plus-no-fit AFTER:gracekv-plus --out fit",
        page="quality.md",
    ),
    "precision": Known(
        "python benchmarks/compare_runs.py BEFORE:gracekv-plus-no-fit AFTER:gracekv-plus-allocated "
        "AFTER:gracekv-plus-8bit AFTER:gracekv-plus-4bit --out precision",
        page="stages/precision.md",
        tables=False,
    ),
    "coarse_entries": Known("python benchmarks/coarse_entries.py --data FOLDER", page="quality.md"),
    "construction-cpu": Known(
        "python benchmarks/construction.py",
        figure="construction",
        alt="Seconds of the prefill, and of trees, surprisal and the rest on top of it",
    ),
    "ten_questions": Known("python benchmarks/ten_questions.py"),
    "extend": Known("python benchmarks/extend.py"),
    "decode": Known(
        "python benchmarks/decode.py",
        figure="decode",
        alt="Speed-up of attention beside the factor of fewer bytes, and of whole steps",
    ),
    "limit-cost": Known("python benchmarks/limit_cost.py", "long-answers.md", tables=False),
    "decode-bits": Known(
        "python benchmarks/decode.py --parts attention --dtype float32,bfloat16 --lengths 8192 "
        "--ratios 1,4,8 --skews 3 --rounds 41 --least --out benchmarks/results/decode-bits.md",
        page="stages/backends.md",
        tables=False,
    ),
    "rivals": Known("python benchmarks/rivals.py"),
    "allocation_quality": Known(
        "python benchmarks/allocation_quality.py", "allocation.md", tables=False
    ),
    "allocate": Known("python benchmarks/allocate.py"),
    "vllm": Known("python benchmarks/vllm_serving.py"),
}

# A longer note, such as a whole pipeline, is in the head of the data file only.
_LONGEST_NOTE = 60
_FIRST_TIMING = "construction-cpu"
_PLOT = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*")


class ResultError(ValueError):
    """A result's file lacks its title, machine or commit."""


@dataclass(frozen=True)
class Result:
    """One file of results.

    Attributes:
        name: of the file, without its suffix.
        title: its heading.
        notes: its first list, item by item.
        body: what follows, in Markdown.
        plots: pictures that belong to it.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    body: str
    plots: tuple[Path, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Result:
        """`ResultError` if title, machine or commit is missing."""
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or not lines[0].startswith("# "):
            raise ResultError(f"{path.name} must begin with its title, '# ...'.")
        first = next((i for i, line in enumerate(lines) if line.startswith("- ")), len(lines))
        after = first
        while after < len(lines) and lines[after].startswith("- "):
            after += 1
        body = [*lines[1:first], *lines[after:]]
        result = cls(
            path.stem,
            lines[0].removeprefix("# "),
            tuple(line.removeprefix("- ") for line in lines[first:after]),
            "\n".join(body).strip(),
            tuple(sorted(path.parent.glob(f"{path.stem}*.png"))),
        )
        for name in ("machine", "commit"):
            if not result.fact(name):
                raise ResultError(
                    f"{path.name} does not say where it was measured. Add '- {name}: ...' to the "
                    f"list above its first table."
                )
        return result

    def fact(self, name: str) -> str:
        """The note that begins with `name` and a colon, without them; "" if there is none."""
        found = (note for note in self.notes if note.startswith(f"{name}:"))
        return next(found, "").removeprefix(f"{name}:").strip()

    @property
    def data(self) -> str:
        """The name of its file of tables."""
        return f"{self.name}.csv"

    @property
    def csv(self) -> str:
        """What is in that file."""
        return to_csv(self.title, self.notes, parts(_PLOT.sub("", self.body)))

    @property
    def anchor(self) -> str:
        """What a link to its section ends in."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def read_all(folder: Path) -> list[Result]:
    """The results of `folder`, in the page's order; how tests ended is none of them."""
    order = {name: place for place, name in enumerate(KNOWN)}
    unknown = order[_FIRST_TIMING] - 0.5
    paths = sorted(folder.glob("*.md"), key=lambda p: (order.get(p.stem, unknown), p.stem))
    results = [Result.read(path) for path in paths if path.stem != "test-long"]
    # "smollm2-length.png" is of "smollm2-length" if there is such a file, else of "smollm2".
    owned = {plot: max((r.name for r in results if plot in r.plots), key=len)
             for r in results for plot in r.plots}  # fmt: skip
    return [
        Result(r.name, r.title, r.notes, r.body, tuple(p for p in r.plots if owned[p] == r.name))
        for r in results
    ]


def page(results: list[Result]) -> str:
    """The page in Markdown."""
    rows = ["| result | machine | commit |", "|---|---|---|"]
    for result in results:
        machine = result.fact("machine").partition(";")[0]
        rows.append(f"| [{result.title}](#{result.anchor}) | {machine} | {result.fact('commit')} |")
    return "\n".join([_INTRO, *rows, "", *(_section(result) for result in results)])


def _section(result: Result) -> str:
    known = KNOWN.get(result.name)
    data = f"assets/results/{result.data}"
    shown = [f"## {result.title} {{ #{result.anchor} }}"]
    links = [f"[All tables]({data})"]
    if known is not None:
        shown.append(f"`{known.command}`")
        if known.page is not None:
            links.append(f"[what they mean]({known.page})")
    shown.append(", ".join(links) + ".")
    if known is not None and known.figure is not None:
        shown.append(_figure(known.figure, known.alt))
    shown += [f"![{result.title}](assets/results/{plot.name})" for plot in result.plots]
    short = [note for note in result.notes if len(note.split()) <= _LONGEST_NOTE]
    shown.append(_folded("How it was measured", "\n".join(f"- {note}" for note in short)))
    if known is None or known.tables:
        found = (part.shown(data) for part in parts(_PLOT.sub("", result.body)))
        # The plots stand above, from where the site can show them.
        shown += [text for text in found if text]
    return "\n\n".join([*shown, ""])


def _figure(name: str, alt: str) -> str:
    return "\n".join(
        f"![{alt}](assets/figures/{name}-{theme}.svg#only-{theme})" for theme in ("light", "dark")
    )


def _folded(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{indented}'


def main() -> None:
    """Write the page, its data files and its plots to where the site finds them."""
    results = read_all(RESULTS)
    for result in results:
        write_atomically(ASSETS / result.data, result.csv.encode())
        for plot in result.plots:
            write_atomically(ASSETS / plot.name, plot.read_bytes())
    write_atomically(PAGE, page(results).encode())
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(result.name for result in results)}")


if __name__ == "__main__":
    main()
