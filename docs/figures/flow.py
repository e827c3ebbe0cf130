"""Value flow: the tokens that the question attends to, and those that they attend to in turn."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from passage import set_lines, write_lines
from style import Theme, capture, new_figure, plain_axes

FIRST_SLOT, LAST_SLOT, LETTERS = 21, 25, 88
_ROWS = ("direct", "hop 1", "hop 2")
_LABELS = (
    "direct: attention from the question",
    "hop 1: attention from the strongest tokens of the first row",
    "hop 2: attention from the strongest of what hop 1 found",
)


def draw(theme: Theme) -> Figure:
    """The three scores over the whole context, then over a passage word by word."""
    data = capture()
    origin, end_region = data["region"]
    colours = (theme.blue, theme.orange, theme.green)
    start, end = data["slots"][FIRST_SLOT], data["slots"][LAST_SLOT]
    placed = set_lines(data["tokens"], start, end, LETTERS)
    lines = placed[-1].line + 1
    size = 3.2 + 0.62 * lines
    figure = new_figure(theme, 8.4, size)
    for row, (name, label, colour) in enumerate(zip(_ROWS, _LABELS, colours, strict=True)):
        axes = figure.add_axes((0.02, 1 - (0.9 + 0.78 * row) / size, 0.96, 0.5 / size))
        plain_axes(axes, theme)
        score = data["relevance"][name]
        axes.fill_between(range(origin, end_region), score, color=colour, linewidth=0.6)
        axes.axvspan(start, end, color=theme.faint, zorder=0, linewidth=0)
        axes.set_xlim(origin, end_region)
        axes.set_ylim(0, sorted(score)[-4] * 1.05)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_title(label, loc="left", fontsize=8.5, color=theme.ink, pad=3)
        axes.tick_params(labelbottom=row == 2)
    axes.set_xlabel(
        "token position; the shaded passage is set below", fontsize=8.5, color=theme.ink
    )

    axes = figure.add_axes((0.02, 0.01, 0.96, 0.62 * lines / size))
    axes.set_axis_off()
    axes.set_xlim(0, LETTERS)
    axes.set_ylim(lines, 0)
    for token in placed:
        for row, (name, colour) in enumerate(zip(_ROWS, colours, strict=True)):
            score = data["relevance"][name]
            # Square roots, relative to the tenth largest score: otherwise a few tokens would dwarf
            # the rest.
            share = (score[token.index - origin] / sorted(score)[-10]) ** 0.5
            axes.add_patch(
                Rectangle(
                    (token.left + 0.1, token.line + 0.08 + 0.15 * row),
                    len(token.text) - 0.2,
                    0.12,
                    facecolor=colour,
                    alpha=min(1.0, share),
                )
            )
    write_lines(axes, theme, placed, LETTERS, 0.74)
    return figure
