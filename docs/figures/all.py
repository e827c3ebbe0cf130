"""Draw every figure of the site, light and dark, into docs/assets/figures.

python docs/figures/all.py [FOLDER]     # in FOLDER instead
"""

from __future__ import annotations

import sys
from pathlib import Path

import auction
import closeness
import construction
import decode
import entries
import flow
import limits
import slots
import states
from style import TARGET, THEMES, save

import tree

FIGURES = {
    "auction": auction.draw,
    "closeness": closeness.draw,
    "construction": construction.draw,
    "decode": decode.draw,
    "entries": entries.draw,
    "flow": flow.draw,
    "limits": limits.draw,
    "slots": slots.draw,
    "states": states.draw,
    "tree": tree.draw,
}


def main(folder: Path) -> None:
    """Write all of them."""
    for name, draw in FIGURES.items():
        for theme in THEMES:
            path = folder / f"{name}-{theme.name}.svg"
            save(draw(theme), path)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
