"""Closeness to the full cache by ratio, from the published means."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measured import Row, number, table
from style import Theme, new_figure, plain_axes

# Lower bound of log KL.
_FLOOR = -9.21


def draw(theme: Theme) -> Figure:
    """A panel for known questions, one for unknown ones."""
    figure = new_figure(theme, 8.4, 3.3)
    known = table("smollm2-default", "method", "2x")
    rivals = [row for row in known if not row["method"].startswith("gracekv")]
    columns = [column for column in known[0] if column.endswith("x")]
    best = {column: min((row[column] for row in rivals), key=number) for column in columns}
    unknown = table("smollm2-agnostic", "method", "2x")
    panels = (
        ("the question is known", [
            (_row(known, "gracekv-plus"), "gracekv-plus", theme.blue),
            (best, f"best of {len(rivals)} rivals", theme.orange),
            (_row(known, "gracekv"), "the paper's method", theme.green),
        ]),
        ("the question is not known", [
            (_row(unknown, "gracekv-agnostic"), "gracekv-agnostic", theme.blue),
            (_row(unknown, "kvzip-two-pass"), "KVzip", theme.orange),
            (_row(unknown, "expected-attention"), "Expected Attention", theme.green),
        ]),
    )  # fmt: skip
    below = ("gracekv-plus", "gracekv-agnostic")
    for place, (title, lines) in enumerate(panels):
        axes = figure.add_axes((0.07 + 0.5 * place, 0.15, 0.42, 0.74))
        plain_axes(axes, theme)
        axes.set_title(title, fontsize=9.5, color=theme.ink, loc="left")
        for row, label, colour in lines:
            _line(axes, row, label, colour, above=label not in below)
        axes.axhline(_FLOOR, color=theme.muted, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(axes.get_xlim()[1], _FLOOR, "full cache", color=theme.muted, fontsize=8,
                  ha="right", va="bottom")  # fmt: skip
        axes.set_ylim(_FLOOR - 0.4, 0.4)
        axes.set_xlabel("times fewer entries", fontsize=8.5)
        if place == 0:
            axes.set_ylabel("log KL to the full cache, nats", fontsize=8.5)
    return figure


def _row(rows: list[Row], method: str) -> Row:
    return next(row for row in rows if row["method"] == method)


def _line(axes: Axes, row: Row, label: str, colour: str, *, above: bool) -> None:
    cells = {column: cell for column, cell in row.items() if column.endswith("x") and cell}
    places = range(len(cells))
    heights = [number(cell) for cell in cells.values()]
    axes.plot(places, heights, color=colour, marker="o", markersize=4, linewidth=1.8)
    middle = len(cells) // 2 - 1
    axes.annotate(
        label, (middle, heights[middle]), xytext=(-4, 5) if above else (5, -4),
        textcoords="offset points", color=colour, fontsize=8.5,
        va="bottom" if above else "top", ha="right" if above else "left",
    )  # fmt: skip
    axes.set_xticks(places, labels=list(cells))
