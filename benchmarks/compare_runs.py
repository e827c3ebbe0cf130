"""Compares a method of one evaluation with methods of others, on the same samples.

    python benchmarks/compare_runs.py runs/before:gracekv-plus runs/after:gracekv-plus --out fit

For a default that changed: all rows were written by `gracekv evaluate` with the same tasks and
seeds, possibly at different commits. Prints and writes `benchmarks/results/NAME.md`: mean log KL to
FullKV at each ratio, the paired difference with its 95 % bootstrap interval over prompts, how many
prompts are better, and the task with the largest loss. With `--tasks`, also the paired differences
of each task with their intervals.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import machine
import numpy as np

from gracekv.evaluate.measures import measure
from gracekv.evaluate.row_files import read_rows
from gracekv.evaluate.tables import generosity, interval
from gracekv.files import write_atomically

RESULTS = Path(__file__).parent / "results"
LOG_KL = measure("log_kl")
Key = tuple[str, int, str, str]


def read(argument: str) -> dict[Key, float]:
    """Log KL by task, length, sample and column of FOLDER:METHOD."""
    folder, _, method = argument.rpartition(":")
    found = {}
    for row in read_rows(Path(folder)):
        value = None if row.get("error") else LOG_KL.read(row)
        if row["method"] == method and value is not None:
            found[row["task"], row["length"] or 0, row["sample"], row["column"]] = value
    if not found:
        raise SystemExit(f"{folder} has no log KL of a method {method!r}.")
    return found


def table(before: dict[Key, float], after: dict[Key, float], tasks: bool) -> list[str]:
    """Rows for prompts of at most 1,100 tokens, then for longer ones; none without prompts."""
    lines = []
    for short in (True, False):
        pairs: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for key, value in after.items():
            if key in before and (key[1] <= 1024) == short:
                pairs[key[3]].append((before[key], value, key[0]))
        if pairs:
            lines += ["", f"Prompts of {'about 1,000' if short else '2,048 and 4,096'} tokens:", ""]
            lines += by_ratio(pairs)
            lines += by_task(pairs) if tasks else []
    return lines


def by_ratio(pairs: dict[str, list[tuple[float, float, str]]]) -> list[str]:
    """A row for each ratio."""
    lines = [
        "| | prompts | before | after | difference | better | largest loss of a task |",
        "|--:|--:|--:|--:|--:|--:|---|",
    ]
    for column in sorted(pairs, key=generosity):
        rows = pairs[column]
        differences = [new - old for old, new, _ in rows]
        loss, task = max((fmean(x), name) for name, x in task_differences(rows).items())
        lines.append(
            f"| {column} | {len(rows)} | {fmean(x for x, _, _ in rows):.2f} | "
            f"{fmean(x for _, x, _ in rows):.2f} | {with_interval(differences)} | "
            f"{sum(x < 0 for x in differences)} | "
            f"{f'{task} {loss:+.2f}' if loss > 0 else 'none'} |"
        )
    return lines


def by_task(pairs: dict[str, list[tuple[float, float, str]]]) -> list[str]:
    """A row for each task, with the difference at each ratio."""
    columns = sorted(pairs, key=generosity)
    cells = {column: task_differences(pairs[column]) for column in columns}
    names = sorted({task for own in cells.values() for task in own})
    lines = [
        "",
        "### By task",
        "",
        f"| task | prompts | {' | '.join(columns)} |",
        "|---" + "|--:" * (len(columns) + 1) + "|",
    ]
    for task in names:
        own = [cells[column].get(task, []) for column in columns]
        shown = (with_interval(x) if x else "" for x in own)
        lines.append(f"| {task} | {max(map(len, own))} | {' | '.join(shown)} |")
    return lines


def task_differences(rows: list[tuple[float, float, str]]) -> dict[str, list[float]]:
    tasks: dict[str, list[float]] = defaultdict(list)
    for old, new, task in rows:
        tasks[task].append(new - old)
    return tasks


def with_interval(differences: list[float]) -> str:
    spread = interval([np.array(differences)])
    # A single prompt has no interval.
    ends = f" [{spread.low:+.2f}, {spread.high:+.2f}]" if spread.samples > 1 else ""
    return f"{spread.mean:+.2f}{ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", metavar="FOLDER:METHOD")
    parser.add_argument("after", metavar="FOLDER:METHOD", nargs="+")
    parser.add_argument("--title", default="Before and after")
    parser.add_argument("--out", default="compare_runs", metavar="NAME")
    parser.add_argument("--tasks", action="store_true", help="also the differences of each task")
    parser.add_argument("--commit", help="of the rows, if another")
    args = parser.parse_args()
    before = read(args.before)
    lines = [
        f"# {args.title}",
        "",
        f"- machine: {machine.cpu()}, {machine.cores()}, CPU; {machine.versions()}; two processes "
        f"of one thread at once",
        f"- commit: {args.commit or machine.commit()}",
        "- Mean log KL to FullKV over the reference answer, by prompt; not below log 1e-4. Paired "
        "differences with 95 % bootstrap intervals over prompts; below 0: better after.",
    ]
    for argument in args.after:
        after = read(argument)
        if not before.keys() & after.keys():
            raise SystemExit(f"{args.before} and {argument} have no prompt and ratio in common.")
        if len(args.after) > 1:
            lines += ["", f"## {argument.rpartition(':')[2]}"]
        lines += table(before, after, args.tasks)
    text = "\n".join(lines) + "\n"
    print(text)
    write_atomically(RESULTS / f"{args.out}.md", text.encode())


if __name__ == "__main__":
    main()
