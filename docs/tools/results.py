"""The results page, made from the tables and plots in benchmarks/results.

    python docs/tools/results.py

`make results` measures them: every output of its parts has a section with its plots, in the order
of the parts, even if it is not measured yet. Files that it does not make (`results_plan.OUTSIDE`)
come last and say so. A result must say where it was measured: "- machine: ..." and "- commit: ..."
above its tables. A section has means, standings and short tables; all tables of the file, including
those of single tasks, are in the section's data file (`result_data`).
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_data import parts, to_csv

from gracekv.files import write_atomically

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from results_plan import MOST_MINUTES, OUTSIDE, PARTS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
ASSETS = ROOT / "docs" / "assets" / "results"

_INTRO = (
    "<!-- Written by docs/tools/results.py from benchmarks/results; change those. -->\n\n"
    "# Results\n\n"
    f"What was measured, where, and by which command. `make results` measures all but the "
    f"last section anew, at one commit, in {MOST_MINUTES} minutes on two fast cores. "
    "`make results-page` writes this page from `benchmarks/results/`; a test fails if it is out "
    "of date. The meaning of the figures is under "
    "[Keeping the answers](quality.md) and [Limits and failure cases](limits.md). SmolLM2 is "
    "SmolLM2-135M-Instruct, from 4-bit weights (GGUF Q4_1) converted to float32.\n\n"
    "A section shows means, standings and short tables. **All tables** leads to everything "
    "measured, task by task and with intervals in brackets: one CSV file per result, whose "
    'first lines give machine, commit and settings (`pandas.read_csv(path, comment="#")`).\n'
)
_OUTSIDE = (
    "## Not made by `make results` { #outside }\n\n"
    "These need hardware that the other results' machine lacks, or are tests. Each names its "
    "own commit.\n"
)


@dataclass(frozen=True)
class Known:
    """What the page shows for a result in addition to its file.

    Attributes:
        page: another page that explains its tables, or None.
        tables: whether the tables, and how they were measured, are shown here, too, not only on
            that page and in the data file.
        figure: name of its figure in docs/figures, or None.
        alt: description of that figure.
    """

    page: str | None = None
    tables: bool = True
    figure: str | None = None
    alt: str = ""


KNOWN = {
    "smollm2-default": Known("quality.md"),
    "smollm2-agnostic": Known("quality.md"),
    "agnostic-differences": Known("quality.md", tables=False),
    "answers": Known("quality.md"),
    "answers-agnostic": Known("quality.md"),
    "precision": Known("stages/precision.md"),
    "precision-differences": Known("stages/precision.md", tables=False),
    "compaction": Known("why-not.md"),
    "ablations": Known("quality.md"),
    "fit": Known("quality.md"),
    "fit-agnostic": Known("quality.md", tables=False),
    "long-outputs": Known("long-answers.md"),
    "memory": Known("limits.md"),
    "construction-cpu": Known(
        "limits.md",
        figure="construction",
        alt="Seconds of the prefill, and of trees, surprisal and the rest on top of it",
    ),
    "construction-plus": Known("limits.md"),
    "construction-all": Known("limits.md"),
    "decode": Known(
        figure="decode",
        alt="Speed-up of attention beside the factor of fewer bytes, and of whole steps",
    ),
    "decode-bits": Known("stages/backends.md", tables=False),
    "limit-cost": Known("long-answers.md", tables=False),
    "extend": Known("ask.md", tables=False),
    "ten_questions": Known("why-not.md"),
    "vllm": Known("vllm.md"),
    "vllm-plugin": Known("vllm.md"),
    "vllm_compress": Known("vllm.md"),
    "gpu": Known("limits.md", tables=False),
    "gpu-compression": Known("limits.md", tables=False),
    "fuzz": Known("security.md"),
    "conversation": Known("conversations.md", tables=False),
    "vllm_memory": Known("vllm.md", tables=False),
}

# The commands that measure each file, one per line; shards share a line.
COMMANDS = {
    name: "\n".join(
        dict.fromkeys(
            ("OMP_NUM_THREADS=1 " if len(part.commands) > 1 or part.threads == 1 else "")
            + re.sub(r" --shard \d/\d$", "", command)
            .format(data="FOLDER", rows=f"runs/results/{part.name}")
            .replace("vllm-python", ".venv-vllm/bin/python")
            for command in part.commands
        )
    )
    for part in PARTS
    for name in part.outputs
}

# In words. Longer notes, such as a whole pipeline, appear only at the top of the data file.
_LONGEST_NOTE = 60
_PLOT = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*")


class ResultError(ValueError):
    """A result's file lacks its title, machine or commit."""


@dataclass(frozen=True)
class Result:
    """One file of results.

    Attributes:
        name: name of the file, without its suffix.
        title: its heading.
        notes: items of its first list.
        body: the rest, in Markdown.
        plots: its plots.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    body: str
    plots: tuple[Path, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a file; `ResultError` if title, machine or commit is missing."""
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
        """The note that begins with `name` and a colon, without these; "" if there is none."""
        found = (note for note in self.notes if note.startswith(f"{name}:"))
        return next(found, "").removeprefix(f"{name}:").strip()

    @property
    def data(self) -> str:
        """The name of its data file."""
        return f"{self.name}.csv"

    @property
    def csv(self) -> str:
        """The content of its data file."""
        return to_csv(self.title, self.notes, parts(_PLOT.sub("", self.body)))


def anchor(name: str) -> str:
    """The anchor of a result's section."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_all(folder: Path) -> list[Result]:
    """The results in `folder`, in the order of their parts; others after them, by name.

    Without the summary of the tests (`test-long`).
    """
    order = [*COMMANDS, *OUTSIDE]
    paths = {path.stem: path for path in sorted(folder.glob("*.md")) if path.stem != "test-long"}
    names = [name for name in order if name in paths]
    names += [name for name in paths if name not in order]
    results = [Result.read(paths[name]) for name in names]
    # "smollm2-length.png" belongs to "smollm2-length" if that exists, else to "smollm2".
    owned = {plot: max((r.name for r in results if plot in r.plots), key=len)
             for r in results for plot in r.plots}  # fmt: skip
    return [
        Result(r.name, r.title, r.notes, r.body, tuple(p for p in r.plots if owned[p] == r.name))
        for r in results
    ]


def page(results: list[Result], folder: Path | None = None) -> str:
    """The page in Markdown; with `folder`, parts without a file get a section that says so."""
    found = {result.name: result for result in results}
    names = [*(COMMANDS if folder else [n for n in COMMANDS if n in found])]
    names += [name for name in found if name not in COMMANDS and name not in OUTSIDE]
    state = _state(folder) if folder else None
    sections = [_section(found[x], state) if x in found else _missing(x) for x in names]
    outside = [_section(found[name]) for name in OUTSIDE if name in found]
    told = [_run(state)] if state else []
    return "\n".join([_INTRO, *told, *sections, *([_OUTSIDE, *outside] if outside else [])])


def _state(folder: Path) -> dict[str, Any] | None:
    """The state of `make results`, or None."""
    path = folder / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _run(state: dict[str, Any]) -> str:
    """A line about the run of `make results`."""
    ended = state["parts"].values()
    short = [f"{name} ({x['why']})" for name, x in state["parts"].items() if x["why"]]
    return (
        f"The run: commit {state['commit']}, {state['machine']}; {state['versions']}; "
        f"{sum(outcome['minutes'] for outcome in ended):.0f} minutes, {len(ended)} of {len(PARTS)} "
        f"parts. {f'Not whole: {chr(44).join(short)}. ' if short else ''}Other tables name their "
        "own commit.\n"
    )


def _missing(name: str) -> str:
    return f"## {name} {{ #{anchor(name)} }}\n\n{_commands(name)}\n\nNot measured yet.\n"


def _commands(name: str) -> str:
    return ", ".join(f"`{command}`" for command in COMMANDS[name].splitlines())


def _section(result: Result, state: dict[str, Any] | None = None) -> str:
    """A result's heading, links, notes and tables, without what `_run` already says."""
    known = KNOWN.get(result.name, Known())
    data = f"assets/results/{result.data}"
    level = "###" if result.name in OUTSIDE else "##"
    shown = [f"{level} {result.title} {{ #{anchor(result.name)} }}"]
    links = [f"[All tables]({data})"]
    if result.name in OUTSIDE:
        where = f"{result.fact('machine')}, commit {result.fact('commit')}"
        shown.append(f"By {OUTSIDE[result.name]}; {where}.")
    elif result.name in COMMANDS:
        shown.append(_commands(result.name))
    if known.page is not None:
        links.append(f"[what they mean]({known.page})")
    shown.append(", ".join(links) + ".")
    if known.figure is not None:
        shown.append(_figure(known.figure, known.alt))
    shown += [f"![{result.title}](assets/results/{plot.name})" for plot in result.plots]
    short = [note for note in result.notes if len(note.split()) <= _LONGEST_NOTE]
    for told in (f"{state['machine']}, ", f"; {state['versions']}") if state else ():
        short = [note.replace(told, "") for note in short]
    if known.tables:
        shown.append(_folded("How it was measured", "\n".join(f"- {note}" for note in short)))
        tables = (part.shown(data, level) for part in parts(_PLOT.sub("", result.body)))
        # The plots are already above, with paths that work on the site.
        shown += [text for text in tables if text]
    return "\n\n".join([*shown, ""])


def _figure(name: str, alt: str) -> str:
    return "\n".join(
        f"![{alt}](assets/figures/{name}-{theme}.svg#only-{theme})" for theme in ("light", "dark")
    )


def _folded(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{indented}'


def main() -> None:
    """Write the page, its data files and its plots into the site's folders."""
    results = read_all(RESULTS)
    for path in ASSETS.iterdir():  # also those of removed results
        path.unlink()
    for result in results:
        write_atomically(ASSETS / result.data, result.csv.encode())
        for plot in result.plots:
            write_atomically(ASSETS / plot.name, plot.read_bytes())
    write_atomically(PAGE, page(results, RESULTS).encode())
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(result.name for result in results)}")


if __name__ == "__main__":
    main()
