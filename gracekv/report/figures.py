"""A figure for papers, drawn by matplotlib without touching its global state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from gracekv.errors import ReportError, required
from gracekv.report.entries import Result
from gracekv.report.page import labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_entries(results: Result | Mapping[str, Result]) -> Figure:
    """Draw heat maps [L, G] of the context entries kept in each head, one per result.

    All maps share one logarithmic colour scale, so their colours can be compared. `results` is one
    result, or several by label.

    Raises `ReportError` without results, `MissingDependencyError` without matplotlib.
    """
    drawn, colors = (required(f"matplotlib.{name}", "cli") for name in ("figure", "colors"))
    named = results if isinstance(results, Mapping) else labelled([results])
    if not named:
        raise ReportError("A figure needs at least one result; got none.")
    tables = [result.accounting.entries for result in named.values()]
    every = torch.cat([table.flatten() for table in tables])
    scale = colors.LogNorm(max(1, int(every.min())), max(2, int(every.max())))
    # The object interface draws without a display and leaves matplotlib's global state alone.
    figure: Figure = drawn.Figure(figsize=(2.6 * len(tables) + 1.2, 6.5), layout="constrained")
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axis, label, table in zip(axes, named, tables, strict=True):
        layers, heads = table.shape
        image = axis.imshow(
            table.clamp(min=1).numpy(), norm=scale, aspect="auto", cmap="viridis", origin="lower"
        )
        axis.set_title(f"{label}\n{int(table.sum()):,} entries", fontsize=10)
        ticks = range(0, layers, max(1, layers // 10))
        axis.set(xticks=range(heads), yticks=ticks, xlabel="KV head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(axes), label="context entries kept (log scale)")
    return figure
