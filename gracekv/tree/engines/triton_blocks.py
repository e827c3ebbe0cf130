"""Block sizes of the Triton distortion kernel: a static table, by node length and probes.

Nothing is tuned at run time, so the same trees grow on every machine of a kind. A test compiles
every entry for its GPUs; importing this module does not import triton.
"""

from __future__ import annotations

from dataclasses import dataclass

# Matrix products take 16 rows or more, and powers of two.
_MIN_BLOCK = 16
# Probes of a program; more are divided among several programs.
_MAX_PROBES = 64

LARGEST_DIM = 256
"""Largest head dimension that the kernel takes."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """One kernel configuration.

    Attributes:
        tokens: tokens that a program reads at a time.
        past: tokens that these are combined with at a time.
        probes: probes of a program.
        features: features of keys or values of a product.
        warps: of a program.
        stages: of the software pipeline that loads ahead.
    """

    tokens: int
    past: int
    probes: int
    features: int
    warps: int
    stages: int


def padded_size(size: int) -> int:
    """The power of two that `size` is padded to."""
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


def block_sizes(width: int, probes: int) -> BlockSizes:
    """The configuration for nodes of up to `width` tokens.

    Args:
        width: tokens of the longest node.
        probes: P.
    """
    # Chosen by the registers that compiled code uses (ours): a product's operands fill them, so its
    # inner dimension is the smallest, nothing is loaded ahead, and 32 tokens take eight warps.
    tokens, warps = (16, 4) if width <= 16 else (32, 8)
    return BlockSizes(
        tokens=tokens,
        past=_MIN_BLOCK,
        probes=min(padded_size(probes), _MAX_PROBES),
        features=_MIN_BLOCK,
        warps=warps,
        stages=1,
    )
