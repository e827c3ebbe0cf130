"""Tables, standings and plots of a published evaluation.

    python benchmarks/suite.py runs/default --name smollm2-default
    python benchmarks/suite.py runs/agnostic --name smollm2-agnostic

Writes `benchmarks/results/NAME.md`, and a plot where methods compete; `suites.SUITES` has the
names. A folder with rows of another protocol is refused, since a method that has seen the question
cannot be compared with one that has not. A setting is a task group at a ratio; a method is first if
no other has a lower mean log KL, and tied-first if the paired 95 % interval of the difference to
the first contains 0, which is weak evidence with two prompts per task. Incomplete samples, left by
a run that was stopped, are dropped.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Sequence
from pathlib import Path

import machine
import suite_tables as tables
from suites import NEEDLES, SUITES, TEXTS, Suite, suite_of, with_ours

from gracekv.evaluate.formats import footer, markdown
from gracekv.evaluate.measures import Measure, measure
from gracekv.evaluate.row_files import Row, latest, read_rows
from gracekv.evaluate.tables import FULL, Table, make_tables
from gracekv.files import write_atomically

RESULTS = Path(__file__).parent / "results"
FIDELITY = ("log_kl", "top1")
MARKERS = "osD^v<>PX*hd"


def whole(rows: Sequence[Row]) -> list[Row]:
    """The rows of complete samples.

    A cell is a method at a budget. A sample is incomplete if its cells are a proper subset of
    another sample's at that length.
    """
    rows = list(latest(list(rows)).values())
    cells: dict[tuple[object, str], set[tuple[str, str]]] = {}
    for row in rows:
        place = row["length"], row["sample"]
        cells.setdefault(place, set()).add((row["method"], row["column"]))
    short = {
        sample for (length, sample), own in cells.items()
        if any(own < other for (x, _), other in cells.items() if x == length)
    }  # fmt: skip
    return [row for row in rows if row["sample"] not in short]


def head(rows: Sequence[Row], suite: Suite, commit: str) -> str:
    samples = len({row["sample"] for row in rows})
    return "\n".join(
        [
            f"# {suite.title}",
            "",
            f"- machine: {machine.cpu()}, {machine.cores()}, CPU; {machine.versions()}; two "
            f"processes of one thread at once",
            f"- commit: {commit}",
            f"- model: SmolLM2-135M-Instruct, float32; {samples} prompts, {len(rows):,} cells; "
            f"{suite.protocol.replace('_', '-')}",
            f"- config: `benchmarks/{suite.config}`; recipes as named",
            *(f"- {note}" for note in suite.notes),
            "",
        ]
    )


def fidelity(rows: Sequence[Row], suite: Suite) -> list[str]:
    """Means, differences and standings."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    parts = []
    for name in FIDELITY:
        shown = measure(name)
        found = make_tables(rows, shown, suite.ours)
        averaged = tables.means(found, methods, shown, suite)
        parts += [f"## {shown.title}: mean over the groups", "", averaged, ""]
        for kind, groups in (("needles", NEEDLES), ("texts", TEXTS)):
            if suite.kinds and name == "log_kl":
                averaged = tables.means(found, methods, shown, suite, groups)
                parts += [f"## {shown.title}: mean over {kind}", "", averaged, ""]
    shown = measure("log_kl")
    found = make_tables(rows, shown, suite.ours)
    for base in (suite.ours, *suite.bases):
        text = tables.differences(rows, found, shown, suite, base)
        # With one prompt per group there are no intervals, and the means above suffice.
        parts += (
            []
            if "[" not in text
            else [f"## {shown.title}: minus `{base}`, 95 % intervals", "", text, ""]
        )
    if suite.placed:
        text = tables.standings(tables.places(found, shown, suite), suite)
        parts += ["## Standings by log KL to FullKV", "", text, ""]
    for recipe in (x for x in suite.further if x in methods):
        own = with_ours(suite, recipe)
        settings = tables.places(make_tables(rows, shown, own.ours), shown, own)
        text = tables.behind(settings, own)
        equal = "bytes" if recipe.endswith("-allocated") else "entries"
        parts += [f"## Standings of `{recipe}`, at equal {equal}", "", text, ""]
    for name in () if suite.placed else FIDELITY:
        text = tables.by_task(rows, measure(name))
        parts += [f"## {measure(name).title}: by task", "", text, ""]
    return parts


def plot(found: Sequence[Table], shown: Measure) -> bytes:
    """A PNG with a panel per table: a line per method over the ratios, with 95 % bands."""
    from matplotlib.figure import Figure

    across = min(3, len(found))
    down = math.ceil(len(found) / across)
    figure = Figure(figsize=(4.6 * across, 3.6 * down + 1.2), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flat
    methods = list(dict.fromkeys(m for table in found for m in table.methods))
    lines = {}
    for place, table in zip(axes, found, strict=False):
        ratios = [column for column in table.columns if column.endswith("x")]
        for method in table.methods:
            if full := table.cells.get((method, FULL)):
                lines[method] = place.axhline(full.mean, linestyle="--", color="0.4")
                continue
            at = [column for column in ratios if (method, column) in table.cells]
            x, cells = [float(c[:-1]) for c in at], [table.cells[method, c] for c in at]
            number = methods.index(method)
            # There are ten colours.
            line = "-" if number < 10 else "--"
            style, color = f"{line}{MARKERS[number % len(MARKERS)]}", f"C{number % 10}"
            means = [cell.mean for cell in cells]
            (lines[method],) = place.plot(x, means, style, color=color, lw=1.3, ms=4)
            low, high = [cell.low for cell in cells], [cell.high for cell in cells]
            place.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
        place.set_xscale("log", base=2)
        place.set_xticks([float(c[:-1]) for c in ratios], ratios)
        place.minorticks_off()
        place.set_title(str(table.title), fontsize=9)
        place.set_ylabel(shown.title, fontsize=8)
        place.grid(alpha=0.3)
    for place in axes[len(found) :]:
        place.set_visible(False)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--name", required=True, choices=list(SUITES))
    parser.add_argument("--commit", help="of the rows, if another")
    args = parser.parse_args()
    rows = read_rows(args.runs)
    suite = suite_of(args.name, rows)
    rows = whole(rows)
    parts = [head(rows, suite, args.commit or machine.commit())]
    scored = any(row.get("score") is not None for row in rows)
    if scored:
        text = tables.answers(rows)
        parts += ["## Answers kept: share of FullKV's score, with 95 % intervals", "", text, ""]
    else:
        parts += fidelity(rows, suite)
    if suite.protocol == "query_agnostic" and not scored:
        methods = list(dict.fromkeys(row["method"] for row in rows))
        parts += ["## Cost", "", tables.costs(rows, methods), ""]
    print("\n".join(parts))
    for number, name in enumerate(("score",) if scored else FIDELITY):
        shown = measure(name)
        found = make_tables(rows, shown, None if scored else suite.ours)
        if suite.placed and number == 0:
            drawn = [table for table in found if any(c.endswith("x") for c in table.columns)]
            picture = plot(tables.placed(drawn, suite), shown)
            write_atomically(RESULTS / f"{args.name}.png", picture)
        # Differences only for the first measure, so that it stands out.
        found = found if number == 0 else make_tables(rows, shown)
        text = markdown(found, shown).replace("\n### ", "\n#### ")
        parts += [f"## {shown.title}", "", text, ""]
    parts.append(footer(rows))
    write_atomically(RESULTS / f"{args.name}.md", "\n".join(parts).encode())


if __name__ == "__main__":
    main()
