"""How large the tiles of the fused distortion are: a static table, by nodes and probes.

Nothing is tuned at run time, so the same trees grow on every machine of a kind. A test compiles
every entry for its GPUs; importing this module does not import triton.
"""

from __future__ import annotations

from dataclasses import dataclass

# Matrix products take 16 rows or more, and powers of two.
_SMALLEST = 16
# Probes of a program; more are shared out among several.
_PROBES = 64

LARGEST_DIM = 256
"""Head dimension up to which there are tiles."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One kernel configuration.

    Attributes:
        tokens: tokens that a program reads at a time.
        past: tokens, of those and all before, that they meet at a time.
        probes: probes of a program.
        features: of keys or values that a product takes at a time.
        warps: of a program.
        stages: of the software pipeline that loads ahead.
    """

    tokens: int
    past: int
    probes: int
    features: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """The power of two that `size` is padded to."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


def tiles(width: int, probes: int) -> Tiles:
    """The configuration for nodes of up to `width` tokens.

    Args:
        width: tokens of the longest node.
        probes: P.
    """
    # Read off compiled code (ours): a product's fragments fill the registers, so its inner side is
    # the least there is, nothing is loaded ahead, and 32 tokens take eight warps.
    tokens, warps = (16, 4) if width <= 16 else (32, 8)
    return Tiles(
        tokens=tokens,
        past=_SMALLEST,
        probes=min(padded(probes), _PROBES),
        features=_SMALLEST,
        warps=warps,
        stages=1,
    )
