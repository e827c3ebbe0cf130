"""Draw every figure of the site, light and dark, into docs/assets/figures.

python docs/figures/all.py
"""

from __future__ import annotations

import auction
import entries
import flow
import slots
import states
import tree
from style import THEMES, save

FIGURES = {
    "auction": auction.draw,
    "entries": entries.draw,
    "flow": flow.draw,
    "slots": slots.draw,
    "states": states.draw,
    "tree": tree.draw,
}


def main() -> None:
    """Write all of them."""
    for name, draw in FIGURES.items():
        for theme in THEMES:
            path = save(draw(theme), name, theme)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
