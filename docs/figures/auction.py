"""How the budget was spent: operations by utility per entry, and the entries that they cost."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from style import Theme, capture, new_figure, plain_axes


def draw(theme: Theme) -> Figure:
    """A bar of the budget above a histogram with the cut."""
    data = capture()
    figure = new_figure(theme, 8.4, 4.7)
    colours = {
        "not bought": theme.faint,
        "floor": theme.blue,
        "Add": theme.green,
        "Split": theme.orange,
    }
    _budget(figure, theme, colours)

    auction = data["auction"]
    edges = np.array(auction["edges"])
    axes = figure.add_axes((0.08, 0.115, 0.905, 0.54))
    plain_axes(axes, theme, grid=True)
    bottom = np.zeros(len(edges) - 1)
    for name, colour in colours.items():
        counts = np.array(auction["operations"][name])
        axes.bar(
            edges[:-1], counts, np.diff(edges), bottom, align="edge", color=colour,
            edgecolor=theme.panel, linewidth=0.3,
        )  # fmt: skip
        bottom += counts
    axes.axvline(auction["cut"], color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
    top = bottom.max() * 1.3
    axes.set_ylim(0, top)
    axes.set_xlim(edges[0], edges[-1] + 0.15)
    axes.text(
        auction["cut"] + 0.08, top * 0.97,
        "the cut: above it the auction buys everything", va="top", color=theme.ink, fontsize=8.5,
    )  # fmt: skip
    axes.text(
        auction["cut"] - 0.08, top * 0.97,
        "bought below it: the floor's tokens, and\nsplits whose way the floor has paid",
        va="top", ha="right",
        color=theme.ink, fontsize=8.5,
    )  # fmt: skip
    axes.text(
        edges[0] + 0.1, top * 0.97, "grey: not bought", va="top", color=theme.muted, fontsize=8.5
    )
    ticks = range(int(np.ceil(edges[0])), int(np.floor(edges[-1])) + 1)
    axes.set_xticks(list(ticks), labels=[f"$10^{{{tick}}}$" for tick in ticks])
    axes.set_xlabel(
        "least utility per entry on the way from the root to the operation", fontsize=8.5
    )
    axes.set_ylabel("operations", fontsize=8.5)
    return figure


def _budget(figure: Figure, theme: Theme, colours: dict[str, str]) -> None:
    data = capture()
    units = sum(len(heads) for heads in data["entries"]["8"])
    parts = {
        "recent window": (data["accounting"]["recent"] * units, theme.muted),
        "floor": (data["auction"]["entries"]["floor"], colours["floor"]),
        "Adds": (data["auction"]["entries"]["Add"], colours["Add"]),
        "Splits": (data["auction"]["entries"]["Split"], colours["Split"]),
    }
    axes = figure.add_axes((0.08, 0.80, 0.905, 0.085))
    axes.set_axis_off()
    left = 0
    for name, (count, colour) in parts.items():
        axes.barh(0, count, left=left, height=1, color=colour, edgecolor=theme.panel, linewidth=1)
        axes.text(
            left + count / 2, 0, f"{name}\n{count:,}", ha="center", va="center",
            color=theme.panel, fontsize=8.5, fontweight="bold", linespacing=1.15,
        )  # fmt: skip
        left += count
    axes.set_xlim(0, left)
    figure.text(
        0.08, 0.93, f"{left:,} entries spent at {data['ratio']}x, of a budget of "
        f"{data['accounting']['budget']:,}", color=theme.ink, fontsize=9.5,
    )  # fmt: skip
    figure.text(
        0.08, 0.705, "All operations of all trees, by what they are worth", color=theme.ink,
        fontsize=9.5,
    )  # fmt: skip
