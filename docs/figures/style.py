"""Shared by all figures: two themes, the recorded run, saving."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gracekv.files import write_atomically

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "assets" / "figures"


@dataclass(frozen=True)
class Theme:
    """Colours of one variant; the accents are Okabe and Ito's, safe for colour-blind readers.

    Attributes:
        name: suffix of the file.
        panel: background; opaque, so that a figure looks the same wherever it is shown.
        ink: text and lines.
        muted: axes, guides and secondary text.
        faint: fills of parts that were not kept.
        blue, orange, green, purple: accents.
    """

    name: str
    panel: str
    ink: str
    muted: str
    faint: str
    blue: str
    orange: str
    green: str
    purple: str


LIGHT = Theme(
    name="light",
    panel="#ffffff",
    ink="#1f2328",
    muted="#6b7280",
    faint="#e6e8eb",
    blue="#0072b2",
    orange="#d55e00",
    green="#009e73",
    purple="#aa4499",
)
DARK = Theme(
    name="dark",
    panel="#1e2129",
    ink="#e8eaed",
    muted="#9aa3b0",
    faint="#353b48",
    blue="#56b4e9",
    orange="#e69f00",
    green="#2fbf97",
    purple="#dd88c7",
)
THEMES = (LIGHT, DARK)

_PATH = re.compile(r' d="[^"]*"')
_DECIMALS = re.compile(r"(\d\.\d\d)\d+")


@cache
def capture() -> dict[str, Any]:
    """The data that `capture.py` recorded."""
    data: dict[str, Any] = json.loads((FOLDER / "capture.json").read_text(encoding="utf-8"))
    return data


def new_figure(theme: Theme, width: float, height: float) -> Figure:
    """An empty figure of `width` x `height` inches, outside matplotlib's global state."""
    return Figure(figsize=(width, height), facecolor=theme.panel)


def plain_axes(axes: Axes, theme: Theme, *, grid: bool = False) -> None:
    """Axes in the theme's colours, open at the top and right."""
    axes.set_facecolor(theme.panel)
    axes.tick_params(colors=theme.muted, labelsize=8, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)
        spine.set_linewidth(0.6)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    if grid:
        axes.grid(axis="y", color=theme.faint, linewidth=0.6)
        axes.set_axisbelow(True)


def token_text(token: str) -> str:
    """A token as a label, without surrounding spaces and with line breaks shown."""
    return token.replace("\n", "↵").strip() or "␣"


def save(figure: Figure, path: Path) -> None:
    """Write an SVG; the same figure gives the same bytes."""
    file = io.BytesIO()
    # Text as outlines, since the reader's fonts may have other widths. A fixed salt, since ids
    # inside an SVG are random otherwise.
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "gracekv"}):
        figure.savefig(
            file, format="svg", facecolor=figure.get_facecolor(), metadata={"Date": None}
        )
    # Hundredths of a point are finer than any screen, and halve the file.
    text = _PATH.sub(lambda d: _DECIMALS.sub(r"\1", d[0]), file.getvalue().decode())
    write_atomically(path, text.encode())
