"""Seconds of the prefill, and seconds that compression adds to it, from the published table."""

from __future__ import annotations

from matplotlib.figure import Figure
from measured import number, table
from style import Theme, new_figure, plain_axes

_PARTS = {
    "trees": ("tree s",),
    "surprisal": ("surprisal s",),
    "everything else": ("projections s", "segment s", "value s", "allocate s", "pack s"),
}


def draw(theme: Theme) -> Figure:
    """One bar per prompt length."""
    rows = table("construction-cpu", "tokens", "prefill s", "construction s", "of prefill")
    rows = [row for row in rows if row["prefill s"]]
    figure = new_figure(theme, 8.4, 0.75 + 0.55 * len(rows))
    height = figure.get_figheight()
    axes = figure.add_axes((0.09, 0.42 / height, 0.9, 1 - 0.85 / height))
    plain_axes(axes, theme)
    colours = (theme.blue, theme.orange, theme.purple)
    for place, row in enumerate(rows):
        left = number(row["prefill s"])
        axes.barh(place, left, color=theme.faint)
        axes.text(left / 2, place, f"{left:.1f} s", ha="center", va="center", color=theme.ink,
                  fontsize=8.5)  # fmt: skip
        for columns, colour in zip(_PARTS.values(), colours, strict=True):
            seconds = sum(number(row[column]) for column in columns)
            axes.barh(place, seconds, left=left, color=colour, edgecolor=theme.panel, linewidth=0.8)
            left += seconds
        axes.text(
            left, place, f"  + {number(row['construction s']):.1f} s, "
            f"{100 * number(row['of prefill']):.0f}% of the prefill",
            va="center", color=theme.ink, fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), labels=[f"{row['tokens']}\ntokens" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.3)
    axes.set_xlabel("seconds", fontsize=8.5)
    legend = zip(("prefill", *_PARTS), (theme.faint, *colours), strict=True)
    x = 0.09
    for label, colour in legend:
        figure.text(x, 1 - 0.2 / height, "■", color=colour, fontsize=11, va="center")
        figure.text(x + 0.02, 1 - 0.2 / height, label, color=theme.ink, fontsize=8.5, va="center")
        x += 0.05 + 0.011 * len(label)
    return figure
