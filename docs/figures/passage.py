"""Text set in lines of tokens, for figures that show the context itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from style import Theme, token_text

# Advance width of DejaVu Sans Mono, in em.
_ADVANCE = 0.60205


@dataclass(frozen=True)
class Placed:
    """One token on the page.

    Attributes:
        index: its position in the prompt.
        line: from the top.
        left: in characters of a monospaced font.
        text: as printed, with its leading space, except at the start of a line.
    """

    index: int
    line: int
    left: int
    text: str

    @property
    def right(self) -> int:
        """Where the next token starts."""
        return self.left + len(self.text)


def set_lines(tokens: list[str], start: int, end: int, letters: int) -> list[Placed]:
    """Tokens [start, end) in lines of at most `letters` characters, broken before words."""
    placed: list[Placed] = []
    line, left, index = 0, 0, start
    while index < end:
        # A word is a token with a leading space and the following tokens without one.
        until = index + 1
        while until < end and tokens[until][:1] not in (" ", "\n"):
            until += 1
        word = [_printed(tokens[i]) for i in range(index, until)]
        width = sum(len(text) for text in word)
        if left and left + width > letters:
            line, left = line + 1, 0
        if not left:
            word[0] = word[0].lstrip(" ")
        for offset, text in enumerate(word):
            placed.append(Placed(index + offset, line, left, text))
            left += len(text)
        index = until
    return placed


def write_lines(
    axes: Axes, theme: Theme, placed: Sequence[Placed], letters: int, height: float
) -> None:
    """Print lines, `letters` characters to the axes' width, at `height` below each line's top."""
    figure = axes.get_figure()
    assert figure is not None
    width = axes.get_position().width * figure.get_figwidth() * 72
    for line in range(placed[-1].line + 1):
        axes.text(
            0, line + height, "".join(token.text for token in placed if token.line == line),
            ha="left", va="center", family="DejaVu Sans Mono", color=theme.ink,
            fontsize=width / letters / _ADVANCE,
        )  # fmt: skip


def _printed(token: str) -> str:
    blank = " " if token.startswith(" ") else ""
    return blank + token_text(token) if token.strip(" ") else " "
