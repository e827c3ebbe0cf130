"""Block sizes of the Triton distortion kernel: a static table, by node length and probes.

Nothing is tuned at run time, so the same trees grow on every machine of a kind. A test compiles
every entry for its GPUs; importing this module does not import triton.
"""

from __future__ import annotations

# Matrix products take 16 rows or more, and powers of two.
_MIN_BLOCK = 16
# Probes of a program; more are divided among several programs.
_MAX_PROBES = 64

LARGEST_DIM = 256
"""Largest head dimension that the kernel takes."""


def padded_size(size: int) -> int:
    """The power of two that `size` is padded to."""
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


def block_sizes(width: int, probes: int) -> dict[str, int]:
    """The configuration for nodes of up to `width` tokens.

    BLOCK_T tokens are read at a time and combined with BLOCK_C earlier ones, for BLOCK_P probes of
    a program; a product has BLOCK_F features of keys or values.

    Args:
        width: tokens of the longest node.
        probes: P.
    """
    # Chosen by the registers that compiled code uses (ours): a product's operands fill them, so its
    # inner dimension is the smallest, nothing is loaded ahead, and 32 tokens take eight warps.
    tokens, warps = (16, 4) if width <= 16 else (32, 8)
    sizes = {"BLOCK_T": tokens, "BLOCK_C": _MIN_BLOCK, "BLOCK_F": _MIN_BLOCK}
    sizes["BLOCK_P"] = min(padded_size(probes), _MAX_PROBES)
    return {**sizes, "num_warps": warps, "num_stages": 1}
