"""Tables from rows: methods x budgets for each group, on paired samples only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gracekv.errors import ConfigError
from gracekv.evaluate.measures import Measure
from gracekv.evaluate.row_files import Row, latest, note_marks

Values = NDArray[np.float64]
# Values by task, seed and index.
Samples = dict[tuple[str, int, int], float]

FULL = "full"
RESAMPLES = 9_999
# The fields that identify a sample of one protocol.
_PLACE = ("model", "dtype", "task", "length", "seed", "index")


class Interval(NamedTuple):
    """A mean and its 95 % interval.

    Attributes:
        mean: mean of the tasks' means.
        low: the interval's lower end; NaN if a task has fewer than two samples.
        high: its upper end; NaN likewise.
        samples: number of samples.
    """

    mean: float
    low: float
    high: float
    samples: int


def interval(tasks: Sequence[Values]) -> Interval:
    """The unweighted mean of the tasks' means, with a percentile bootstrap of its samples.

    Each task is resampled separately, so that none gains weight. Since resamples of n samples have
    (n - 1) / n of their variance, they are scaled by the root of n / (n - 1) (Rao and Wu, 1988):
    otherwise intervals from two samples per task cover the truth only four times in five. A paired
    comparison is the interval of the differences. The random stream is fixed: the same rows give
    the same interval.
    """
    mean, low, high = float(np.mean([np.mean(values) for values in tasks])), math.nan, math.nan
    if min(len(values) for values in tasks) > 1:
        rng = np.random.default_rng(0)
        drawn = []
        for values in tasks:
            count = len(values)
            off = rng.choice(values, (RESAMPLES, count)).mean(axis=1) - np.mean(values)
            drawn.append(off * math.sqrt(count / (count - 1)))
        low, high = (mean + np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))).tolist()
    return Interval(mean, low, high, sum(map(len, tasks)))


class Title(NamedTuple):
    """The fields that all rows of a table share; scores on different scales are never mixed.

    Attributes:
        model: name, and dtype unless it is float32.
        protocol: "query_aware" or "query_agnostic".
        group: a suite or a task.
        metric: name of the scores' metric.
        length: total tokens of RULER's samples; None for given texts.
    """

    model: str
    protocol: str
    group: str
    metric: str
    length: int | None

    def __str__(self) -> str:
        place = "" if self.length is None else f", {self.length:,} tokens"
        seen = ", the question not seen" if self.protocol == "query_agnostic" else ""
        return f"{self.group} ({self.metric}{place}{seen})"


@dataclass(frozen=True, slots=True)
class Table:
    """The table of one group of tasks.

    Attributes:
        title: the fields that its rows share.
        tasks: names of the tasks, which are averaged without weights.
        methods: names of the methods, in order of their first row.
        columns: budgets, largest first.
        cells: (method, column) to mean and interval; no entry if a method has no values.
        against: (method, column) to its mean difference from the reference method, by sample.
        reference: the method to compare with, or None.
        unpaired: number of values left out because another method lacks that sample.
        without: the tasks that a column lacks because a method has no values there.
    """

    title: Title
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Interval]
    against: dict[tuple[str, str], Interval]
    reference: str | None
    unpaired: int
    without: dict[str, list[str]]

    def ranks(self, column: str, higher: bool) -> dict[str, int]:
        """1 for the best compressed methods of a column, 2 for the second best; ties share a rank.

        Means that only rounding tells apart are equal. Empty if all are equal.
        """
        held = [method for method in self.methods if (method, column) in self.cells]
        means = {method: float(f"{self.cells[method, column].mean:.9g}") for method in held}
        if len(set(means.values())) < 2:
            return {}
        order = sorted(set(means.values()), reverse=higher)[:2]
        return {m: order.index(mean) + 1 for m, mean in means.items() if mean in order}


def make_tables(rows: Sequence[Row], measure: Measure, against: str | None = None) -> list[Table]:
    """All tables for which `rows` hold values.

    Raises `ConfigError` if rows of one sample and method were made under different settings, if
    rows of one model's name come from different weights, or if `against` is not a method.
    """
    tables: dict[Title, dict[tuple[str, str], Samples]] = {}
    for row in _checked_rows(rows):
        value = measure.read(row)
        if row.get("error") is not None or value is None:
            continue
        shared = (row[name] for name in ("group", "metric", "length"))
        model = row["model"] + f" in {row['dtype']}" * (row["dtype"] != "float32")
        title = Title(model, row["settings"]["protocol"], *shared)
        # Given texts, which have no length, are the same with every seed.
        sample = (row["task"], row["seed"] if row["length"] else 0, row["index"])
        tables.setdefault(title, {}).setdefault((row["method"], row["column"]), {})[sample] = value
    methods = {row["method"] for row in rows}
    if against is not None and methods and against not in methods:
        others = ", ".join(sorted(methods))
        raise ConfigError(f"No rows of the method {against!r}. Methods: {others}.")
    return [_table(title, values, against) for title, values in tables.items()]


def _checked_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for each cell of a table; `ConfigError` if rows differ in settings or weights."""
    results = list(latest(rows).values())
    first_rows: dict[tuple[object, ...], Row] = {}
    hashes: dict[tuple[object, ...], str] = {}
    marks: dict[tuple[str, str], Any] = {}
    for row in results:
        note_marks(row, marks)
        place = (*(row[name] for name in _PLACE), row["settings"]["protocol"])
        # All samples of a cell have the same settings, whatever their seeds; so have a method's
        # budgets, except for fields that another version has. All methods have one answer cap.
        cell = (*place[:4], place[-1], row["method"], row["column"])
        other = first_rows.setdefault(cell, row)
        budget = first_rows.setdefault((*cell[:-1], *(row.get("versions") or {}).items()), row)
        cap = row["settings"].get("max_new_tokens")
        answers = row["settings"].get("generate", True)
        longest = first_rows.setdefault(cell[:-2], row) if answers else row
        changed = [n for n, v in row["settings"].items() if other["settings"].get(n) != v]
        if not changed and longest["settings"].get("max_new_tokens") != cap:
            changed = ["max_new_tokens"]
        piped = any(x.get("pipeline") != row.get("pipeline") for x in (other, budget))
        if changed or piped or other["settings"] != row["settings"]:
            raise ConfigError(
                f"The folder holds rows of {row['method']} on {row['task']} made under different "
                f"settings ({', '.join(changed) or 'pipeline'}). Keep each in its own folder."
            )
        digest = row.get("prompt_hash")
        if digest is not None and hashes.setdefault(place, digest) != digest:
            raise ConfigError(
                f"Methods saw different prompts in sample {row['index']} of {row['task']}: data, "
                f"tokenizer or truncation changed between runs. Run it again in a new folder."
            )
    return results


def _table(title: Title, values: dict[tuple[str, str], Samples], against: str | None) -> Table:
    methods = tuple(dict.fromkeys(method for method, _ in values))
    columns = tuple(sorted({c for _, c in values if c != FULL}, key=generosity))
    cells: dict[tuple[str, str], Interval] = {}
    compared: dict[tuple[str, str], Interval] = {}
    used: set[tuple[str, int, int]] = set()
    unpaired, without = 0, {}
    tasks = tuple(dict.fromkeys(task for scores in values.values() for task, _, _ in scores))
    # FullKV's column comes last, over the samples of all others.
    for column in [*columns, *{c for _, c in values if c == FULL}]:
        present = [m for m in methods if (m, column) in values]
        # A method that keeps everything is compared at every budget.
        samples = {m: scores for (m, c), scores in values.items() if c == FULL}
        samples |= {m: values[m, column] for m in present}
        common = used if column == FULL and used else set.intersection(*map(set, samples.values()))
        unpaired += sum(len(samples[m]) - len(common) for m in present)
        if not common:
            continue
        used |= common
        if lacking := [x for x in tasks if x not in {task for task, _, _ in common}]:
            without[column] = lacking
        arrays = {m: _by_task(scores, common) for m, scores in samples.items()}
        cells |= {(m, column): interval(arrays[m]) for m in present}
        if against in arrays:
            for m in present:
                paired = zip(arrays[m], arrays[against], strict=True)
                if m != against:
                    compared[m, column] = interval([value - other for value, other in paired])
    return Table(title, tasks, methods, columns, cells, compared, against, unpaired, without)


def _by_task(values: Samples, samples: set[tuple[str, int, int]]) -> list[Values]:
    """One array for each task, samples in order, so that methods can be paired."""
    each = itertools.groupby(sorted(samples), lambda sample: sample[0])
    return [np.array([values[sample] for sample in own]) for _, own in each]


def generosity(column: str) -> tuple[int, float]:
    """The key that sorts columns: ratios upwards, then numbers of entries downwards."""
    ratio, entries = column.removesuffix("x"), column.removesuffix(" entries")
    return (0, float(ratio)) if ratio != column else (1, -float(entries))
