"""Slots in the text: where the trajectory turns, and where the segmenter cut."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from passage import set_lines, write_lines
from style import Theme, capture, new_figure

FIRST_SLOT, LAST_SLOT, LETTERS = 20, 27, 88


def draw(theme: Theme) -> Figure:
    """Lines of text, with each token's boundary score above it and its slot as background."""
    data = capture()
    borders = data["slots"]
    start, end = borders[FIRST_SLOT], borders[LAST_SLOT]
    score = data["boundary_score"]
    placed = set_lines(data["tokens"], start, end, LETTERS)
    lines = placed[-1].line + 1
    figure = new_figure(theme, 8.4, 0.62 * lines + 0.62)
    axes = figure.add_axes((0.015, 0.02, 0.97, 0.98 - 0.55 / (0.62 * lines + 0.62)))
    axes.set_axis_off()
    axes.set_xlim(0, LETTERS)
    axes.set_ylim(lines, 0)
    top = max(score[start:end])
    slot_of = {i: n for n in range(FIRST_SLOT, LAST_SLOT) for i in range(*borders[n : n + 2])}
    for token in placed:
        shade = theme.faint if slot_of[token.index] % 2 else theme.panel
        axes.add_patch(
            Rectangle((token.left, token.line + 0.58), len(token.text), 0.36, facecolor=shade)
        )
        height = 0.5 * max(score[token.index], 0) / top
        last = token.index + 1 in borders
        # The score is for a slot that ends after this token, so it is drawn at its right edge.
        axes.add_patch(
            Rectangle(
                (token.right - 0.35, token.line + 0.56 - height),
                0.7,
                height,
                facecolor=theme.orange if last else theme.blue,
            )
        )
        if last:
            axes.plot(
                [token.right] * 2,
                [token.line + 0.58, token.line + 0.94],
                color=theme.orange,
                linewidth=1.6,
            )
    write_lines(axes, theme, placed, LETTERS, 0.77)
    height = figure.get_figheight()
    for x, colour, label in (
        (0.02, theme.blue, "boundary score of each token"),
        (0.30, theme.orange, "chosen border"),
        (0.46, theme.faint, "every second slot"),
    ):
        figure.patches.append(
            Rectangle(
                (x, 1 - 0.30 / height),
                0.012,
                0.11 / height,
                transform=figure.transFigure,
                figure=figure,
                facecolor=colour,
            )
        )
        figure.text(x + 0.02, 1 - 0.245 / height, label, va="center", color=theme.ink, fontsize=8.5)
    return figure
