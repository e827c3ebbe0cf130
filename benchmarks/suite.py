"""Tables, standings and plots of a finished `smollm2_suite.yaml` or `smollm2_agnostic.yaml`.

    python benchmarks/suite.py runs/smollm2
    python benchmarks/suite.py runs/agnostic

Prints the standings of our default recipe and writes `benchmarks/results/smollm2.md`, or
`smollm2-agnostic.md`, with its plots. The rows say which half they are of; a folder with rows of
both is refused, since a method that has seen the question is not compared with one that has not.
A setting is a task group at a ratio; a method is first where no other's mean log KL is lower, and
tied-first where the paired 95 % interval of the difference to the first contains 0.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

import machine
import numpy as np
from rich.console import Console
from suite_halves import HALVES, NEEDLES, TEXTS, Half, half_of

from gracekv.evaluate.formats import footer, markdown
from gracekv.evaluate.measures import Measure, measure
from gracekv.evaluate.plots import plot
from gracekv.evaluate.row_files import Row, latest, read_rows
from gracekv.evaluate.statistics import interval
from gracekv.evaluate.tables import Table, make_tables
from gracekv.files import write_atomically

RESULTS = Path(__file__).parent / "results"
SHOWN = ("log_kl", "top1", "score")


def title(table: Table) -> str:
    length = "" if table.title.length is None else f", {table.title.length:,} tokens"
    return f"{table.title.group} ({', '.join(t.partition(':')[2] for t in table.tasks)}{length})"


def standing(table: Table, column: str, shown: Measure, half: Half) -> tuple[int, bool, str]:
    """Place of ours among the placed, whether it is tied with the first, and the first's name."""
    means = {m: table.cells[m, column].mean for m in half.placed if (m, column) in table.cells}
    order = sorted(means, key=lambda m: means[m], reverse=shown.higher)
    first, place = order[0], 1 + order.index(half.ours)
    if place == 1:
        return 1, True, first
    delta = table.against[first, column].delta
    return place, delta.low <= 0 <= delta.high, first


def standings(found: Sequence[Table], shown: Measure, half: Half) -> str:
    """One row a group, one column a ratio: the place, and who is first where ours is not."""
    ours = half.ours
    found = [table for table in found if any((ours, c) in table.cells for c in table.columns)]
    columns = list(dict.fromkeys(c for table in found for c in table.columns if c.endswith("x")))
    columns.sort(key=lambda c: float(c[:-1]))
    lines = [
        f"| group | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    firsts = tied = worse = total = 0
    for table in found:
        cells = []
        for column in columns:
            if (ours, column) not in table.cells:
                cells.append("")
                continue
            place, even, first = standing(table, column, shown, half)
            total += 1
            firsts += place == 1
            tied += place > 1 and even
            worse += place > 2
            cells.append("**1**" if place == 1 else f"{place}{' =' if even else ''} ({first})")
        lines.append(f"| {title(table)} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Of {total} settings `{ours}` is first in {firsts}, tied with the first in {tied} more, "
        f"and worse than second in {worse}.",
    ]
    return "\n".join(lines)


def placed(found: Sequence[Table], half: Half) -> list[Table]:
    """The same without ablations: more lines than one can tell apart."""
    lines = (*half.placed, "gracekv-draft", "fullkv")
    return [
        dataclasses.replace(table, methods=tuple(m for m in lines if m in table.methods))
        for table in found
    ]


def means(
    found: Sequence[Table],
    methods: Sequence[str],
    shown: Measure,
    half: Half,
    groups: Collection[str] | None = None,
) -> str:
    """Unweighted mean over the groups (None: all), a row a method."""
    # Groups that were run at every ratio, so that columns compare.
    found = [table for table in found if (half.ours, half.last) in table.cells]
    found = [table for table in found if groups is None or table.title.group in groups]
    columns = sorted(
        {c for table in found for c in table.columns if c.endswith("x")},
        key=lambda c: float(c[:-1]),
    )
    lines = [f"| method | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for method in methods:
        cells = []
        for column in columns:
            values = [b.cells[method, column].mean for b in found if (method, column) in b.cells]
            whole = len(values) == len(found)
            cells.append(f"{sum(values) / len(values):.{shown.digits}f}" if whole else "")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row], found: Sequence[Table], shown: Measure, half: Half) -> str:
    """What each placed method lacks to ours, in the mean over the groups, with 95 % intervals.

    Prompts are paired, and resampled within their group.
    """
    titles = [table.title for table in found if (half.ours, half.last) in table.cells]
    whole = {(title.group, title.metric, title.length) for title in titles}
    values: dict[tuple[str, str], dict[tuple[str, ...], dict[str, float]]] = {}
    for row in latest(list(rows)).values():
        group, value = (row["group"], row["metric"], row["length"]), shown.read(row)
        if row["error"] is None and value is not None and group in whole:
            cell = values.setdefault((row["method"], row["column"]), {})
            cell.setdefault(group, {})[row["sample"]] = value
    columns = sorted({c for _, c in values if c.endswith("x")}, key=lambda c: float(c[:-1]))
    lines = [f"| method | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for method in half.placed:
        cells = []
        for column in columns:
            own, other = values.get((half.ours, column), {}), values.get((method, column), {})
            paired = [
                np.array([other[group][x] - own[group][x] for x in sorted(own[group])])
                for group in own
                if own[group].keys() <= other.get(group, {}).keys()
            ]
            if method == half.ours or not paired or len(paired) < len(own):
                cells.append("")
                continue
            delta, digits = interval(paired), shown.digits
            ends = f"{delta.low:+.{digits}f}, {delta.high:+.{digits}f}"
            cells.append(f"{delta.mean:+.{digits}f} [{ends}]")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def answers(rows: Sequence[Row]) -> str:
    """FullKV's score by task, and how much of it each method keeps: sums over the same prompts."""
    scored = [row for row in rows if row.get("score") is not None]
    full = {row["sample"]: row["score"] for row in scored if row["method"] == "fullkv"}
    kept: dict[tuple[str, str], dict[str, tuple[float, float, int]]] = {}
    for row in scored:
        if row["method"] == "fullkv" or row["sample"] not in full:
            continue
        for task in (row["task"].partition(":")[2], "all"):
            cells = kept.setdefault((row["method"], row["column"]), {})
            got, of, count = cells.get(task, (0.0, 0.0, 0))
            cells[task] = got + row["score"], of + full[row["sample"]], count + 1
    tasks = sorted({task for cells in kept.values() for task in cells} - {"all"})
    columns = sorted(kept, key=lambda key: (key[0], float(key[1].rstrip("x"))))
    lines = [
        f"| task | prompts | FullKV | {' | '.join(f'{m} {c}' for m, c in columns)} |",
        "|---" + "|--:" * (len(columns) + 2) + "|",
    ]
    for task in [*tasks, "all"]:
        most = max((cells[task] for cells in kept.values() if task in cells), key=lambda x: x[2])
        shares = [
            f"{kept[key][task][0] / kept[key][task][1]:.0%}"
            # A method that ran some of the tasks has no share of all.
            if task in kept[key] and kept[key][task][2] == most[2] and most[1]
            else ""
            for key in columns
        ]
        score = f"{most[1] / most[2]:.0%}"
        lines.append(f"| {task} | {most[2]} | {score} | {' | '.join(shares)} |")
    return "\n".join(lines)


def costs(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """What each method adds to the prefill of the same sample, and what it leaves of the bytes."""
    lines = ["| method | construction / prefill | bytes at 4x |", "|---|--:|--:|"]
    done = [row for row in rows if row["error"] is None]
    for method in methods:
        own = [row for row in done if row["method"] == method]
        times = [row["construction_seconds"] / row["prefill_seconds"] for row in own]
        bytes_ = [row["bytes"] for row in own if row["column"] == "4x"]
        share = sum(b["kv"] for b in bytes_) / max(1, sum(b["full_kv"] for b in bytes_))
        lines.append(
            f"| {method} | {median(times):.2f} | {f'{share:.0%}' if bytes_ else ''} |"
            if times
            else f"| {method} | | |"
        )
    return "\n".join(lines)


def head(rows: Sequence[Row], half: Half, title: str | None, config: str | None) -> str:
    samples = len({row["sample"] for row in rows})
    protocol = rows[0]["settings"]["protocol"].replace("_", "-")
    return "\n".join(
        [
            f"# {title or half.title}",
            "",
            f"- machine: {machine.cores()}, CPU; other work ran beside it, so no times are shown",
            f"- commit: {machine.commit()}",
            f"- model: SmolLM2-135M-Instruct, float32; {samples} prompts, {len(rows):,} cells; "
            f"{protocol}; recent window at most half of the budget",
            f"- config: `{config or half.config}`; recipes as named",
            f"- {half.tuned}",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--name", help="of the results; default: that of the half")
    parser.add_argument("--title", help="of the page; default: that of the half")
    parser.add_argument("--config", help="what the rows are of; default: the half's whole suite")
    args = parser.parse_args()
    rows = read_rows(args.runs)
    half = half_of(rows)
    name_of_results = args.name or half.name
    parts = [head(rows, half, args.title, args.config)]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for name in SHOWN:
        if name == "score" and not any(row.get("score") is not None for row in rows):
            continue
        shown = measure(name)
        found = make_tables(rows, shown, half.ours)
        if name == "log_kl":
            for short in ("log_kl", "top1"):
                other = measure(short)
                tables = make_tables(rows, other, half.ours)
                averaged = means(tables, methods, other, half)
                parts += [f"## {other.title}: mean over the groups", "", averaged, ""]
                for kind, groups in (("needles", NEEDLES), ("texts", TEXTS)):
                    if half is HALVES["query_agnostic"] and short == "log_kl":
                        averaged = means(tables, methods, other, half, groups)
                        parts += [f"## {other.title}: mean over {kind}", "", averaged, ""]
                        Console().print(kind, averaged, sep="\n")
            text = differences(rows, found, shown, half)
            parts += [f"## {shown.title}: minus `{half.ours}`, 95 % intervals", "", text, ""]
            text = standings(found, shown, half)
            parts += ["## Standings by log KL to FullKV", "", text, ""]
            Console().print(text)
        if name == "score":
            text = answers(rows)
            parts += ["## Answers kept: share of FullKV's score", "", text, ""]
            Console().print(text)
        if name != "top1":
            suffix = "" if name == "log_kl" else f"-{name}"
            drawn = [b for b in found if any(c.endswith("x") for c in b.columns)]
            picture = plot(placed(drawn, half), shown)
            write_atomically(RESULTS / f"{name_of_results}{suffix}.png", picture)
        # Differences with their tests for the first measure only: the rest would bury it.
        tables = found if name == SHOWN[0] else make_tables(rows, shown)
        parts += [f"## {shown.title}", "", markdown(tables, shown).replace("\n### ", "\n#### "), ""]
    if half is HALVES["query_agnostic"]:
        parts += ["## Cost", "", costs(rows, methods), ""]
    parts.append(footer(rows))
    write_atomically(RESULTS / f"{name_of_results}.md", "\n".join(parts).encode())


if __name__ == "__main__":
    main()
