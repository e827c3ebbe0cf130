"""One tree of prototypes: nodes that were split, kept and never bought."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme, capture, new_figure, token_text


def draw(theme: Theme) -> Figure:
    """Intervals by depth, root on top, tokens below."""
    data = capture()
    tree = data["tree"]
    start, end = data["slots"][tree["slot"] :][:2]
    depth = max(tree["level"]) + 1
    figure = new_figure(theme, 8.4, 5.6)
    axes = figure.add_axes((0.075, 0.155, 0.915, 0.755))
    axes.set_axis_off()
    axes.set_xlim(0, end - start)
    axes.set_ylim(depth, 0)
    nodes = zip(*(tree[name] for name in ("start", "end", "level", "kept", "split")), strict=True)
    for a, b, level, kept, split in nodes:
        exact = b - a == 1
        if kept:
            face, edge, ink = theme.blue if exact else theme.orange, theme.panel, theme.panel
        elif split:
            face, edge, ink = theme.panel, theme.ink, theme.ink
        else:
            face, edge, ink = theme.faint, theme.panel, theme.muted
        axes.add_patch(
            FancyBboxPatch(
                (a - start + 0.07, level + 0.14),
                b - a - 0.14,
                0.68,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=face,
                edgecolor=edge,
                linewidth=0.9,
            )
        )
        axes.text(
            (a + b) / 2 - start, level + 0.49, str(b - a), ha="center", va="center",
            color=ink, fontsize=7.5, fontweight="bold" if kept else "normal",
        )  # fmt: skip
    for level in range(depth):
        axes.text(
            -0.35, level + 0.48, "root" if level == 0 else str(level), ha="right", va="center",
            color=theme.muted, fontsize=8,
        )  # fmt: skip
    for i in range(start, end):
        axes.text(
            i - start + 0.5, depth + 0.12, token_text(data["tokens"][i]), rotation=60, ha="right",
            va="top", rotation_mode="anchor", color=theme.ink, fontsize=8.5,
        )  # fmt: skip
    legend = (
        (theme.panel, theme.ink, "split: replaced by its children"),
        (theme.orange, theme.panel, "kept as one merged entry"),
        (theme.blue, theme.panel, "kept exactly"),
        (theme.faint, theme.panel, "not bought"),
    )
    x = 0.075
    for face, edge, label in legend:
        figure.patches.append(
            FancyBboxPatch(
                (x, 0.943),
                0.018,
                0.02,
                boxstyle="round,pad=0,rounding_size=0.004",
                transform=figure.transFigure,
                figure=figure,
                facecolor=face,
                edgecolor=edge,
            )
        )
        figure.text(x + 0.025, 0.952, label, va="center", color=theme.ink, fontsize=8.5)
        x += 0.06 + 0.0078 * len(label)
    return figure
