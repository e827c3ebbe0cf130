"""Tables as markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

from gracekv.evaluate.measures import Measure
from gracekv.evaluate.row_files import Row, latest
from gracekv.evaluate.statistics import Interval
from gracekv.evaluate.tables import FULL, Table, make_tables

_CSV = (
    "model", "protocol", "group", "metric", "length", "measure", "method", "column", "mean", "low",
    "high", "samples", "against", "delta", "delta_low", "delta_high", "wins", "ties", "losses",
    "p_holm",
)  # fmt: skip

Format = Callable[[Sequence[Table], Measure], str]
# How a mean is marked by its rank in a column: 0 for none, best, second.
_MARKDOWN = ("{}", "**{}**", "<u>{}</u>")
_LATEX = ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")


def markdown(found: Sequence[Table], measure: Measure) -> str:
    """One table after the other; best bold, second underlined, 95 % intervals in brackets."""
    parts = []
    for table in found:
        header = ["method", *(table.columns or (FULL,))]
        body = _body(table, _ranked(table, measure, _MARKDOWN))
        # FullKV has one cell, whatever the budget; a table wants as many as its header.
        body = [[*cells, *[""] * (len(header) - len(cells))] for cells in body]
        parts += [f"### {table.title}: {measure.title}", _about(table), _grid(header, body)]
        if table.against:
            parts.append(_comparisons(table, measure))
    return "\n\n".join(parts) + "\n"


def latex(found: Sequence[Table], measure: Measure) -> str:
    """A booktabs tabular for each table, in the paper's layout."""
    parts = []
    for table in found:
        columns = table.columns or (FULL,)
        width = len(columns) + 1
        # The reader's document needs \\usepackage{booktabs}.
        heading = _escape(f"{table.title}: {measure.title}")
        lines = [
            rf"\begin{{tabular}}{{l{'c' * len(columns)}}}",
            r"\toprule",
            rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{heading}}}}} \\",
            rf"\cmidrule(lr){{1-{width}}}",
            " & ".join([r"\textbf{Method}", *map(_latex_column, columns)]) + r" \\",
            r"\midrule",
        ]
        for cells in _body(table, _ranked(table, measure, _LATEX, r"{{\scriptsize {}}}"), _escape):
            if len(cells) == 2 and len(columns) > 1:
                lines.append(rf"{cells[0]} & \multicolumn{{{len(columns)}}}{{c}}{{{cells[1]}}} \\")
                lines.append(r"\midrule")
            else:
                lines.append(" & ".join(cells) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def as_csv(found: Sequence[Table], measure: Measure) -> str:
    """One line a cell, with everything that the other formats round or leave out."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for table in found:
        for (method, column), cell in table.cells.items():
            line = [*astuple(table.title), measure.name, method, column, *astuple(cell)]
            versus = table.against.get((method, column))
            if versus is not None:
                *delta, _samples = astuple(versus.delta)
                line += [table.reference, *delta, *astuple(versus)[1:]]
            writer.writerow(line)
    return out.getvalue()


FORMATS: dict[str, Format] = {"markdown": markdown, "latex": latex, "csv": as_csv}


def deltas(rows: Sequence[Row], base: str, measure: Measure) -> str:
    """Markdown: the base's mean, and every variant's paired difference from it, a table a group.

    Differences that `compare` finds at p < 0.05, Holm-adjusted, are bold.
    """
    parts = []
    for table in make_tables(rows, measure, base):

        def shown(method: str, column: str, table: Table = table) -> str:
            if method == base:
                return f"{table.cells[base, column].mean:.{measure.digits}f}"
            versus = table.against.get((method, column))
            text = "–" if versus is None else difference(versus.delta, measure.digits)
            return f"**{text}**" if versus is not None and versus.p < 0.05 else text

        methods = (base, *(m for m in table.methods if m != base))
        varied = tuple(m for m in methods if (m, FULL) not in table.cells)
        body = _body(replace(table, methods=varied), shown)
        parts.append(f"### {table.title}: {measure.title}, difference from {base}")
        parts.append(_grid(["method", *table.columns], body))
    return "\n\n".join(parts) + "\n"


def difference(delta: Interval, digits: int) -> str:
    """A signed mean with its interval."""
    return f"{delta.mean:+.{digits}f} {_bounds(delta, digits)}".rstrip()


def footer(rows: Sequence[Row]) -> str:
    """Versions and data behind the rows, and the cells that failed, as markdown."""
    chosen = list(latest(list(rows)).values())
    made = sorted({", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in chosen})
    sources = sorted({row["source"] for row in chosen if "source" in row})
    lines = [f"{len(chosen):,} cells; versions: {'; '.join(made)}; data: {'; '.join(sources)}."]
    if len(made) > 1:
        lines.append("The rows were made with different versions: look before comparing them.")
    failed = Counter(
        (row["task"], row["method"], row["column"], row["error"]["type"])
        for row in chosen
        if row.get("error") is not None
    )
    lines += [
        f"Failed: {task}, {method} at {column}: {count} x {error}."
        for (task, method, column, error), count in failed.items()
    ]
    return "\n\n".join(lines) + "\n"


def _body(
    table: Table, shown: Callable[[str, str], str], name: Callable[[str], str] = str
) -> list[list[str]]:
    """Each method's name and what is `shown` of its cells; FullKV has one cell."""
    body = []
    for method in table.methods:
        columns = (FULL,) if (method, FULL) in table.cells else table.columns
        cells = (shown(method, c) if (method, c) in table.cells else "–" for c in columns)
        body.append([name(method), *cells])
    return body


def _ranked(
    table: Table, measure: Measure, marks: Sequence[str], bounds: str = "{}"
) -> Callable[[str, str], str]:
    """Shows a mean by the mark of its rank, and its interval as `bounds` does."""
    ranks = {c: table.ranks(c, measure.higher) for c in table.columns}

    def shown(method: str, column: str) -> str:
        cell, digits = table.cells[method, column], measure.digits
        mark = marks[ranks.get(column, {}).get(method, 0)]
        mean, ends = mark.format(f"{cell.mean:.{digits}f}"), _bounds(cell, digits)
        return f"{mean} {bounds.format(ends)}" if ends else mean

    return shown


def _bounds(cell: Interval, digits: int) -> str:
    if math.isnan(cell.low):
        return ""
    return f"[{cell.low:.{digits}f}, {cell.high:.{digits}f}]"


def _comparisons(table: Table, measure: Measure) -> str:
    sense = "higher" if measure.higher else "lower"
    rows = [
        [
            *cell,
            difference(versus.delta, measure.digits),
            f"{versus.wins} / {versus.ties} / {versus.losses}",
            f"{versus.p:.3f}",
        ]
        for cell, versus in table.against.items()
    ]
    header = ["method", "budget", "difference", "wins / ties / losses", "p"]
    return (
        f"Against {table.reference} on the same samples ({sense} is better; p: sign-flip "
        f"permutation, Holm over the methods of a budget):\n\n{_grid(header, rows)}"
    )


def _about(table: Table) -> str:
    counts = sorted({cell.samples for cell in table.cells.values()})
    several = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    text = (
        f"{table.title.model}, {table.title.protocol.replace('_', '-')}; mean of "
        f"{', '.join(table.tasks)}; {several} samples in all."
    )
    if table.unpaired:
        text += f" {table.unpaired} values left out: another method lacks their sample."
    return text


def _grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A markdown table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _latex_column(column: str) -> str:
    return rf"${column[:-1]}\times$" if column.endswith("x") else _escape(column)


def _escape(text: str) -> str:
    for mark in "&%$#_{}":
        text = text.replace(mark, "\\" + mark)
    return text
