"""One slot in six heads: dropped, one entry, a few, or token by token."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme, capture, new_figure, token_text

# (layer, KV head), from nothing kept to nearly everything.
HEADS = ((3, 1), (12, 0), (20, 1), (28, 0), (17, 1), (24, 1))


def draw(theme: Theme) -> Figure:
    """Rows of intervals over the slot's tokens."""
    data = capture()
    start, end = data["slots"][data["tree"]["slot"] :][:2]
    words = [token_text(token) for token in data["tokens"][start:end]]
    heads = len(data["entries"]["8"][0])
    figure = new_figure(theme, 8.4, 4.3)
    axes = figure.add_axes((0.165, 0.06, 0.82, 0.72))
    axes.set_axis_off()
    axes.set_xlim(0, len(words))
    axes.set_ylim(len(HEADS), 0)
    for row, (layer, head) in enumerate(HEADS):
        kept = data["states"][layer * heads + head]
        exact = sum(b - a == 1 for a, b in kept)
        parts = []
        if exact:
            parts.append(f"{exact} exact")
        if len(kept) > exact:
            parts.append(f"{len(kept) - exact} merged")
        axes.text(
            -0.4, row + 0.36, f"layer {layer}, head {head}", ha="right", va="center",
            color=theme.ink, fontsize=8.5,
        )  # fmt: skip
        axes.text(
            -0.4, row + 0.68, " + ".join(parts) or "dropped", ha="right", va="center",
            color=theme.muted, fontsize=7.5,
        )  # fmt: skip
        if not kept:
            axes.add_patch(_box(0, len(words), row, theme.panel, theme.muted, dashed=True))
        for a, b in kept:
            colour = theme.blue if b - a == 1 else theme.orange
            axes.add_patch(_box(a - start, b - start, row, colour, theme.panel))
            if b - a > 1:
                axes.text(
                    (a + b) / 2 - start,
                    row + 0.5,
                    str(b - a),
                    ha="center",
                    va="center",
                    color=theme.panel,
                    fontsize=8.5,
                    fontweight="bold",
                )
    for i, word in enumerate(words):
        axes.text(
            i + 0.5, -0.12, word, rotation=60, ha="left", va="bottom", rotation_mode="anchor",
            color=theme.ink, fontsize=8.5,
        )  # fmt: skip
    return figure


def _box(
    a: float, b: float, row: int, face: str, edge: str, *, dashed: bool = False
) -> FancyBboxPatch:
    return FancyBboxPatch(
        (a + 0.08, row + 0.2),
        b - a - 0.16,
        0.6,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=face,
        edgecolor=edge,
        linewidth=0.8,
        linestyle=(0, (4, 3)) if dashed else "-",
    )
