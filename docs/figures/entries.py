"""Entries of every layer and KV head at three budgets, relative to an equal share."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from style import Theme, capture, new_figure, plain_axes


def draw(theme: Theme) -> Figure:
    """Three heat maps, heads by layers, on one logarithmic scale."""
    data = capture()
    figure = new_figure(theme, 8.4, 3.9)
    colours = LinearSegmentedColormap.from_list("share", [theme.blue, theme.faint, theme.orange])
    norm = LogNorm(0.4, 2.5)
    for number, (ratio, table) in enumerate(data["entries"].items()):
        entries = np.array(table).T
        share = entries.sum() / entries.size
        axes = figure.add_axes((0.115, 0.735 - 0.285 * number, 0.775, 0.17))
        plain_axes(axes, theme)
        image = axes.pcolormesh(
            entries / share, cmap=colours, norm=norm, edgecolors=theme.panel, linewidth=0.8
        )
        axes.invert_yaxis()
        axes.set_yticks(np.arange(len(entries)) + 0.5, labels=range(len(entries)))
        ticks = np.arange(0, entries.shape[1], 5)
        axes.set_xticks(ticks + 0.5, labels=ticks)
        axes.set_title(
            f"{ratio}x: {entries.sum():,} entries, an equal share would be {share:.0f} a head; "
            f"heads hold {entries.min()} to {entries.max()}",
            loc="left", fontsize=8.5, color=theme.ink,
        )  # fmt: skip
        axes.set_ylabel("KV head", fontsize=8)
    axes.set_xlabel("layer", fontsize=8.5)
    bar = figure.colorbar(image, cax=figure.add_axes((0.915, 0.165, 0.014, 0.74)))
    bar.set_ticks([0.5, 1, 2], labels=["½", "1", "2"])
    bar.minorticks_off()
    bar.ax.tick_params(colors=theme.ink, labelsize=8.5, length=3)
    bar.outline.set_edgecolor(theme.muted)
    bar.set_label("entries / equal share", color=theme.ink, fontsize=8.5)
    return figure
