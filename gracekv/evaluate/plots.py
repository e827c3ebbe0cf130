"""Score against ratio, with bands."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from gracekv.errors import ConfigError
from gracekv.evaluate.measures import Measure
from gracekv.evaluate.tables import FULL, Table

SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^v<>PX*hd"


def plot(found: Sequence[Table], measure: Measure, suffix: str = ".png") -> bytes:
    """One panel for each table, one line for each method over the ratios, with 95 % bands.

    Raises `ConfigError` if no table has a ratio, or for another suffix than .png, .svg, .pdf.
    """
    if suffix not in SUFFIXES:
        raise ConfigError(f"A plot ends in one of {', '.join(SUFFIXES)}; got {suffix!r}.")
    shown = [table for table in found if any(c.endswith("x") for c in table.columns)]
    if not shown:
        raise ConfigError("There is nothing to plot: no rows with ratios. Run with --ratios.")
    from matplotlib.figure import Figure

    across = min(3, len(shown))
    down = math.ceil(len(shown) / across)
    figure = Figure(figsize=(4.6 * across, 3.6 * down + 1.2), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    methods = list(dict.fromkeys(m for table in shown for m in table.methods))
    for place, table in zip(axes.flat, shown, strict=False):
        ratios = [column for column in table.columns if column.endswith("x")]
        for method in table.methods:
            if full := table.cells.get((method, FULL)):
                place.axhline(full.mean, linestyle="--", color="0.4", label=method)
            shown_at = [c for c in ratios if (method, c) in table.cells]
            if full or not shown_at:
                continue
            x, cells = [float(c[:-1]) for c in shown_at], [table.cells[method, c] for c in shown_at]
            number = methods.index(method)
            style = {"color": f"C{number % 10}", "lw": 1.3}
            line, marker = "-" if number < 10 else ":", _MARKERS[number % len(_MARKERS)]
            place.plot(x, [c.mean for c in cells], line, marker=marker, ms=4, label=method, **style)
            bounds = [c.low for c in cells], [c.high for c in cells]
            place.fill_between(x, *bounds, alpha=0.12, **{**style, "lw": 0})
        place.set_xscale("log", base=2)
        ticks = [float(c[:-1]) for c in ratios]
        place.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        place.minorticks_off()
        place.set_title(str(table.title), fontsize=9)
        place.set_ylabel(measure.title, fontsize=8)
        place.grid(alpha=0.3)
    for place in axes.flat[len(shown) :]:
        place.set_visible(False)
    entries: dict[str, Any] = {}
    for place in axes.flat:
        entries |= dict(zip(*reversed(place.get_legend_handles_labels()), strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format=suffix[1:], dpi=150)
    return out.getvalue()
