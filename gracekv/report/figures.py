"""Figures for papers, drawn by matplotlib without touching its global state."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gracekv.errors import ReportError, required
from gracekv.report.data import report_column
from gracekv.report.entries import Result, kept_entries
from gracekv.report.page import default_label, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Longest entry of each bar of merged entries; a last bar takes all longer ones. Source: ours.
_BINS = (2, 4, 8, 16, 32, 64)
# Columns of a map of the prompt. Source: ours.
_COLUMNS = 600
# Okabe and Ito's colours, which colour-blind readers can tell apart; hatches are for print.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_HATCHES = ("", "//", "..", "xx", "\\\\", "--")


def plot_entries(results: Result | Mapping[str, Result]) -> Figure:
    """Draw heat maps [L, G] of the context entries kept in each head, one per result.

    All maps share one logarithmic colour scale, so their colours can be compared. `results` is one
    result, or several by label. Raises `MissingDependencyError` without matplotlib.
    """
    from matplotlib.colors import LogNorm

    named = _named(results)
    tables = [result.accounting.entries for result in named.values()]
    every = torch.cat([table.flatten() for table in tables])
    scale = LogNorm(max(1, int(every.min())), max(2, int(every.max())))
    figure = _figure(2.6 * len(tables) + 1.2, 6.5)
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


def plot_resolution(results: Result | Mapping[str, Result]) -> Figure:
    """Draw the shares of tokens, over all heads, that are dropped, exact or merged, by length.

    Raises `ReportError` as `result.report` does, `MissingDependencyError` without matplotlib.
    """
    named = _named(results)
    names = ["dropped", "exact", "2"]
    names += [f"{low + 1}–{high}" for low, high in pairwise(_BINS)]
    names.append(f"> {_BINS[-1]}")
    figure = _figure(7.0, 3.4)
    axis = figure.subplots()
    width = 0.8 / len(named)
    for number, (label, result) in enumerate(named.items()):
        made = report_column(label, result)
        counts = made.resolution().double()
        length = torch.arange(len(counts))
        place = torch.bucketize(length, torch.tensor((0, 1, *_BINS)))
        sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, place, counts)
        axis.bar(
            [at + width * (number - (len(named) - 1) / 2) for at in range(len(names))],
            (sums / counts.sum().clamp(min=1) * 100).tolist(),
            width,
            label=label,
            color=_COLOURS[number % len(_COLOURS)],
            hatch=_HATCHES[number % len(_HATCHES)],
            edgecolor="white",
        )
    axis.set_xticks(range(len(names)), names)
    shares = "share of (token, head) pairs, %"
    axis.set(xlabel="tokens of the entry that holds the token", ylabel=shares)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def plot_map(result: Result) -> Figure:
    """Draw heads by position, coloured by how finely each part of the context is kept.

    The colour is the mean of 1 / (tokens of the entry that holds the token), 0 for dropped tokens;
    layer 0 is at the bottom.

    Raises `ReportError` as `result.report` does, `MissingDependencyError` without matplotlib.
    """
    figure = _figure(8.0, 4.2)
    entries = kept_entries(result)
    lengths = entries.entry_lengths()
    share = torch.where(lengths > 0, 1.0 / lengths.clamp(min=1), 0.0)
    first, last = entries.region
    columns = max(1, min(_COLUMNS, last - first))
    column = torch.arange(last - first) * columns // max(1, last - first)
    sums = torch.zeros(len(share), columns, dtype=torch.float32).index_add_(1, column, share)
    means = sums / torch.bincount(column, minlength=columns).clamp(min=1)
    axis = figure.subplots()
    image = axis.imshow(
        means.numpy(),
        aspect="auto",
        cmap="viridis",
        origin="lower",
        interpolation="nearest",
        extent=(first, last, 0, entries.layers),
        vmin=0.0,
        vmax=1.0,
    )
    layers = f"layer ({entries.heads} KV heads each)"
    axis.set(xlabel="position in the prompt", ylabel=layers)
    axis.set_title(default_label(result), fontsize=10)
    figure.colorbar(image, ax=axis, label="entries per token")
    return figure


def plot_auction(results: Result | Mapping[str, Result]) -> Figure:
    """Draw utility over entries, one panel per result, and the certified upper bound, dashed.

    Raises `ReportError` if a result has no auction (FullKV, or loaded from a file),
    `MissingDependencyError` without matplotlib.
    """
    named = _named(results)
    records = {label: r._run.recorded() for label, r in named.items()}
    curves = {label: None if r is None else r.curve for label, r in records.items()}
    if without := [label for label, curve in curves.items() if curve is None]:
        raise ReportError(
            f"There is no auction to draw for {', '.join(map(repr, without))}: everything was "
            f"kept, or the result was loaded from a file. Draw the result of compress."
        )
    figure = _figure(4.6 * len(curves), 3.4)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axis, (label, curve) in zip(panels, curves.items(), strict=True):
        assert curve is not None  # checked above
        axis.plot(curve.entries.numpy(), curve.utility.numpy(), color=_COLOURS[0], label="bought")
        if curve.floor_entries:
            axis.axvspan(0, curve.floor_entries, color=_COLOURS[0], alpha=0.12, lw=0, label="floor")
        if len(curve.bound):
            at, bound = [0, *curve.bound_entries.tolist()], [0.0, *curve.bound.tolist()]
            axis.plot(at, bound, "--", color=_COLOURS[5], label="upper bound")
        axis.set_title(label, fontsize=10)
        axis.set(xlabel="entries spent", xlim=(0, None), ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
    panels[0].set_ylabel("utility")
    return figure


def _named(results: Result | Mapping[str, Result]) -> Mapping[str, Result]:
    if not isinstance(results, Mapping):
        return labelled([results])
    if not results:
        raise ReportError("A figure needs at least one result; got none.")
    return results


def _figure(width: float, height: float) -> Figure:
    """An empty figure of `width` x `height` inches."""
    # The object interface draws without a display and leaves matplotlib's global state alone.
    shown = required("matplotlib.figure", "cli")
    figure: Figure = shown.Figure(figsize=(width, height), layout="constrained")
    required("matplotlib.backends.backend_agg", "cli").FigureCanvasAgg(figure)
    return figure
