"""Tables of `suite.py`: standings, means, differences with intervals, answers, costs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from suites import Suite

from gracekv.evaluate.measures import Measure
from gracekv.evaluate.row_files import Row, latest
from gracekv.evaluate.tables import Table, interval

RESAMPLES = 4000


def title(table: Table) -> str:
    length = "" if table.title.length is None else f", {table.title.length:,} tokens"
    return f"{table.title.group} ({', '.join(t.partition(':')[2] for t in table.tasks)}{length})"


class Standing(NamedTuple):
    """Our place in a setting.

    Attributes:
        place: 1 for the first.
        even: whether it is first or tied with the first.
        first: the first's name.
        clear: whether it is first, and further from every rival than the paired 95 % interval; None
            if there are no intervals, since a task has one prompt.
    """

    place: int
    even: bool
    first: str
    clear: bool | None = False


def standing(table: Table, column: str, shown: Measure, suite: Suite) -> Standing:
    """Our place among the placed methods."""
    means = {m: table.cells[m, column].mean for m in suite.placed if (m, column) in table.cells}
    order = sorted(means, key=lambda m: means[m], reverse=shown.higher)
    first, place = order[0], 1 + order.index(suite.ours)
    if place == 1:
        lows = [table.against[m, column].low for m in order[1:]]
        clear = None if any(map(math.isnan, lows)) else all(low > 0 for low in lows)
        return Standing(1, True, first, clear)
    delta = table.against[first, column]
    return Standing(place, delta.low <= 0 <= delta.high, first)


Places = dict[tuple[str, str], Standing]


def places(found: Sequence[Table], shown: Measure, suite: Suite) -> Places:
    """Our `standing` in each setting, by the group's title and the ratio."""
    return {
        (title(table), column): standing(table, column, shown, suite)
        for table in found
        for column in table.columns
        if column.endswith("x") and (suite.ours, column) in table.cells
    }


def standings(settings: Places, suite: Suite) -> str:
    """One row per group, one column per ratio: our place, and who is first if not ours."""
    groups, columns = (list(dict.fromkeys(x)) for x in zip(*settings, strict=True))
    columns.sort(key=lambda c: float(c[:-1]))
    lines = [
        f"| group | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for group in groups:
        cells = [_place(settings.get((group, column))) for column in columns]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", counted(settings, suite)])


def behind(settings: Places, suite: Suite) -> str:
    """How often ours is first, and the settings where it is not."""
    rows = [
        f"| {group} | {column} | {_place(own)} |"
        for (group, column), own in settings.items()
        if own.place > 1
    ]
    head = ["", "| group | ratio | place |", "|---|---|---|"] if rows else []
    return "\n".join([counted(settings, suite), *head, *rows])


def counted(settings: Places, suite: Suite) -> str:
    """The numbers of settings: ours is first, clearly first, tied, and worse than second."""
    own = settings.values()
    firsts = [x.clear for x in own if x.place == 1]
    single = firsts.count(None)
    return (
        f"Of {len(own)} settings `{suite.ours}` is first in {len(firsts)}, tied with the first in "
        f"{sum(x.place > 1 and x.even for x in own)} more, and worse than second in "
        f"{sum(x.place > 2 for x in own)}. In {firsts.count(True)} of the firsts, the 95 % "
        f"interval of the paired difference to every rival excludes 0"
        + (f", and {single} have no intervals, with one prompt a task." if single else ".")
    )


def _place(own: Standing | None) -> str:
    if own is None:
        return ""
    return "**1**" if own.place == 1 else f"{own.place}{' =' if own.even else ''} ({own.first})"


def placed(found: Sequence[Table], suite: Suite) -> list[Table]:
    """The same without ablations, which would be too many lines to tell apart."""
    lines = (*suite.placed, "fullkv")
    return [
        dataclasses.replace(table, methods=tuple(m for m in lines if m in table.methods))
        for table in found
    ]


def means(
    found: Sequence[Table],
    methods: Sequence[str],
    shown: Measure,
    suite: Suite,
    groups: Collection[str] | None = None,
) -> str:
    """Unweighted mean over the groups (None: all), one row per method."""
    # Only groups that were run at every ratio, so that columns are comparable.
    found = [table for table in found if (suite.ours, suite.last) in table.cells]
    found = [table for table in found if groups is None or table.title.group in groups]
    columns = sorted(
        {c for table in found for c in table.columns if c.endswith("x")},
        key=lambda c: float(c[:-1]),
    )
    # Methods that keep everything have their own column, except FullKV, the reference.
    columns += (
        ["full"]
        if any((m, "full") in t.cells for t in found for m in methods if m != "fullkv")
        else []
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


def differences(
    rows: Sequence[Row], found: Sequence[Table], shown: Measure, suite: Suite, base: str
) -> str:
    """Each method minus `base`, averaged over the groups, with 95 % intervals.

    Prompts are paired, and resampled within their task. Tasks have equal weight in their group, and
    groups in the mean, as in `means`.
    """
    titles = [table.title for table in found if (suite.ours, suite.last) in table.cells]
    whole = {(title.group, title.metric, title.length) for title in titles}
    values: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, float]]] = {}
    for row in latest(list(rows)).values():
        group, value = (row["group"], row["metric"], row["length"]), shown.read(row)
        if row["error"] is None and value is not None and group in whole:
            cell = values.setdefault((row["method"], row["column"]), {})
            cell.setdefault((*group, row["task"]), {})[row["sample"]] = value
    columns = sorted({c for _, c in values if c.endswith("x")}, key=lambda c: float(c[:-1]))
    lines = [f"| method | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for method in dict.fromkeys(method for method, _ in values):
        cells = []
        for column in columns:
            own, other = values.get((base, column), {}), values.get((method, column), {})
            sizes = Counter(task[:3] for task in own)
            paired = [
                np.array([other[task][x] - own[task][x] for x in sorted(own[task])])
                * (len(own) / len(sizes) / sizes[task[:3]])
                for task in own
                if own[task].keys() <= other.get(task, {}).keys()
            ]
            if method == base or not paired or len(paired) < len(own):
                cells.append("")
                continue
            delta, digits = interval(paired), shown.digits
            ends = f" [{delta.low:+.{digits}f}, {delta.high:+.{digits}f}]"
            # One prompt of a task has no interval.
            known = delta.low == delta.low
            cells.append(f"{delta.mean:+.{digits}f}{ends if known else ''}")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def answers(rows: Sequence[Row]) -> str:
    """FullKV's score by task, and the share of it that each method keeps, over the same prompts.

    In brackets: 95 % bootstrap intervals over prompts, for all tasks together.
    """
    scored = [row for row in rows if row.get("score") is not None]
    full = {row["sample"]: row["score"] for row in scored if row["method"] == "fullkv"}
    kept: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for row in scored:
        if row["method"] == "fullkv" or row["sample"] not in full:
            continue
        for task in (row["task"].partition(":")[2], "all"):
            cells = kept.setdefault((row["method"], row["column"]), {})
            cells.setdefault(task, []).append((row["score"], full[row["sample"]]))
    tasks = sorted({task for cells in kept.values() for task in cells} - {"all"})
    columns = sorted(kept, key=lambda key: (key[0], float(key[1].rstrip("x"))))
    lines = [
        f"| task | prompts | FullKV | {' | '.join(f'{m} {c}' for m, c in columns)} |",
        "|---" + "|--:" * (len(columns) + 2) + "|",
    ]
    for task in [*tasks, "all"]:
        most = max((cells[task] for cells in kept.values() if task in cells), key=len)
        shares = [
            # A method that ran only some of the tasks has no overall share.
            _share(kept[key][task], bounds=task == "all")
            if task in kept[key] and len(kept[key][task]) == len(most)
            else ""
            for key in columns
        ]
        score = f"{fmean(of for _, of in most):.0%}"
        lines.append(f"| {task} | {len(most)} | {score} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share(pairs: Sequence[tuple[float, float]], *, bounds: bool) -> str:
    """Sum of the scores over FullKV's sum, as "92% [83, 103]"; "" if FullKV scores 0."""
    got, of = np.array(pairs).T
    if not of.sum():
        return ""
    share = f"{got.sum() / of.sum():.0%}"
    if not bounds:
        return share
    drawn = np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))
    shares = 100 * got[drawn].sum(1) / np.maximum(of[drawn].sum(1), 1e-9)
    low, high = np.quantile(shares, [0.025, 0.975])
    return f"{share} [{low:.0f}, {high:.0f}]"


def by_task(rows: Sequence[Row], shown: Measure) -> str:
    """Means by task and ratio over the prompts that all methods have, one column per method."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in latest(list(rows)).values():
        value = shown.read(row)
        if row["error"] is None and value is not None and row["column"].endswith("x"):
            place = cells.setdefault((row["task"].partition(":")[2], row["column"]), {})
            place.setdefault(row["method"], {})[row["sample"]] = value
    methods = list(dict.fromkeys(method for found in cells.values() for method in found))
    lines = [
        f"| task | ratio | {' | '.join(methods)} |",
        "|---" + "|--:" * (len(methods) + 1) + "|",
    ]
    for task, column in sorted(cells, key=lambda key: (float(key[1][:-1]), key[0])):
        found = cells[task, column]
        shared = set.intersection(*map(set, found.values()))
        values = {m: [own[x] for x in sorted(shared)] for m, own in found.items() if shared}
        means = (f"{fmean(values[m]):.{shown.digits}f}" if m in values else "" for m in methods)
        lines.append(f"| {task} | {column} | {' | '.join(means)} |")
    return "\n".join(lines)


def costs(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Time that each method adds to the prefill of the same sample, and bytes that it keeps."""
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
