"""How much fewer entries speed up a decoding step on a CPU, from the published tables."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measured import Row, number, table
from style import Theme, new_figure, plain_axes

CONTEXT = "8,192"


def draw(theme: Theme) -> Figure:
    """Attention alone on the left, whole steps on the right."""
    figure = new_figure(theme, 8.4, 3.3)
    alone = table("decode", "context", "longest / other heads", "speed-up", "fewer bytes")
    alone = [row for row in alone if row["context"] == CONTEXT and _compressed(row)]
    uneven = sorted({row["longest / other heads"] for row in alone}, key=number)
    axes = figure.add_axes((0.065, 0.15, 0.53, 0.66))
    series = {"fewer bytes read": [number(r["fewer bytes"]) for r in alone
                                   if r["longest / other heads"] == uneven[0]]}  # fmt: skip
    for one in uneven:
        label = f"speed-up, heads uneven {one}"
        series[label] = [number(r["speed-up"]) for r in alone if r["longest / other heads"] == one]
    ratios = [r["cache"] for r in alone if r["longest / other heads"] == uneven[0]]
    _bars(axes, theme, ratios, series, (theme.faint, theme.blue, theme.green))
    axes.set_title(f"attention alone, {CONTEXT} tokens", loc="left", fontsize=9, color=theme.ink)

    whole = [row for row in table("decode", "context", "ms/token", "speed-up") if _compressed(row)]
    contexts = sorted({row["context"] for row in whole}, key=number)
    axes = figure.add_axes((0.665, 0.15, 0.325, 0.66))
    series = {f"{c} tokens": [number(r["speed-up"]) for r in whole if r["context"] == c]
              for c in contexts}  # fmt: skip
    ratios = [row["cache"] for row in whole if row["context"] == contexts[0]]
    _bars(axes, theme, ratios, series, (theme.orange, theme.purple))
    axes.set_title("a whole step of the model", loc="left", fontsize=9, color=theme.ink)
    return figure


def _compressed(row: Row) -> bool:
    return row["cache"].endswith("x") and number(row["cache"]) > 1


def _bars(
    axes: Axes,
    theme: Theme,
    ratios: list[str],
    series: dict[str, list[float]],
    colours: tuple[str, ...],
) -> None:
    plain_axes(axes, theme, grid=True)
    width = 0.8 / len(series)
    for place, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        at = [i - 0.4 + width * (place + 0.5) for i in range(len(ratios))]
        axes.bar(at, values, width * 0.94, color=colour, label=label)
        for x, value in zip(at, values, strict=True):
            axes.text(x, value, f"{value:.1f}", ha="center", va="bottom", color=theme.ink,
                      fontsize=7.5)  # fmt: skip
    axes.axhline(1, color=theme.muted, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(ratios)), labels=ratios)
    axes.set_ylim(0, max(max(values) for values in series.values()) * 1.35)
    axes.set_ylabel("times FullKV", fontsize=8.5)
    axes.legend(loc="upper left", fontsize=8, frameon=False, labelcolor=theme.ink)
