"""Tables as markdown or CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence

from gracekv.evaluate.measures import Measure
from gracekv.evaluate.row_files import Row, latest
from gracekv.evaluate.tables import FULL, Interval, Table, Title

_CSV = (*Title._fields, "measure", "method", "column", *Interval._fields)
# How a mean is marked by its rank in a column: 0 for none, best, second.
_MARKS = ("{}", "**{}**", "<u>{}</u>")


def markdown(tables: Sequence[Table], measure: Measure) -> str:
    """One table after another; best bold, second underlined, 95 % intervals in brackets."""
    parts = []
    for table in tables:
        header = ["method", *(table.columns or (FULL,))]
        body = [_shown(table, measure, method) for method in table.methods]
        parts += [f"### {table.title}: {measure.title}", about(table), _grid(header, body)]
        if table.against:
            parts.append(_comparisons(table, measure))
    return "\n\n".join(parts) + "\n"


def as_csv(tables: Sequence[Table], measure: Measure) -> str:
    """One line per cell, with all digits of its mean and interval, then one per difference."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for table in tables:
        gaps = f"{measure.name} minus {table.reference}"
        for name, cells in ((measure.name, table.cells), (gaps, table.against)):
            for cell, shown in cells.items():
                writer.writerow([*table.title, name, *cell, *shown])
    return out.getvalue()


FORMATS = {"markdown": markdown, "csv": as_csv}


def footer(rows: Sequence[Row]) -> str:
    """Versions and data behind the rows, and the cells that failed, as markdown."""
    cells = list(latest(rows).values())
    versions = sorted({", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in cells})
    sources = sorted({row["source"] for row in cells if row.get("source")})
    lines = [f"{len(cells):,} cells; versions: {'; '.join(versions)}; data: {'; '.join(sources)}."]
    if len(versions) > 1:
        lines.append("The rows were made with different versions: compare them with care.")
    if cut := len({row["sample"] for row in cells if row.get("removed_tokens")}):
        lines.append(f"Prompts cut to the model's or the panel's length: {cut:,}.")
    failures = [row for row in cells if row.get("error") is not None]
    failed = Counter((x["task"], x["method"], x["column"], x["error"]["type"]) for x in failures)
    for (task, method, column, error), count in failed.items():
        lines.append(f"Failed: {task}, {method} at {column}: {count} x {error}.")
    return "\n\n".join(lines) + "\n"


def _shown(table: Table, measure: Measure, method: str) -> list[str]:
    """The method's name and its cells, marked by rank; FullKV has one cell for all budgets."""
    cells, width = [method], len(table.columns or (FULL,))
    for column in (FULL,) if (method, FULL) in table.cells else table.columns:
        cell = table.cells.get((method, column))
        rank = table.ranks(column, measure.higher).get(method, 0)
        mark = "{}" if column == FULL else _MARKS[rank]
        cells.append("–" if cell is None else _interval(cell, f".{measure.digits}f", mark))
    return [*cells, *[""] * (1 + width - len(cells))]


def _interval(cell: Interval, digits: str, mark: str = "{}") -> str:
    """A mean and, if there is one, its interval."""
    mean = mark.format(f"{cell.mean:{digits}}")
    return mean if math.isnan(cell.low) else f"{mean} [{cell.low:{digits}}, {cell.high:{digits}}]"


def _comparisons(table: Table, measure: Measure) -> str:
    sense = "higher" if measure.higher else "lower"
    rows = [[*cell, _interval(gap, f"+.{measure.digits}f")] for cell, gap in table.against.items()]
    return (
        f"Difference from {table.reference} on the same samples ({sense} is better):\n\n"
        f"{_grid(['method', 'budget', 'difference'], rows)}"
    )


def about(table: Table) -> str:
    """One line: the model, the tasks, how many samples were averaged, and what is missing."""
    counts = {column: cell.samples for (_, column), cell in table.cells.items()}
    several = f"{max(counts.values(), default=0)} samples in all"
    if len(set(counts.values())) > 1:
        each = (f"{n} {'for fullkv' if x == FULL else f'at {x}'}" for x, n in counts.items())
        several = f"samples: {', '.join(each)}"
    text = (
        f"{table.title.model}, {table.title.protocol.replace('_', '-')}; mean of "
        f"{', '.join(table.tasks)}; {several}."
    )
    if table.unpaired:
        text += f" {table.unpaired} values left out: another method lacks their sample."
    for column, tasks in table.without.items():
        text += f" {column} is without {', '.join(tasks)}."
    return text


def _grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A markdown table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    # A name may hold a line break or a bar.
    plain = ([" ".join(x.split()).replace("|", "\\|") for x in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in plain)
