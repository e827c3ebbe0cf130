"""What compiled code about nodes reads and works in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.products_cpu import COLUMNS

WAITING = 32
"""Intervals that wait for their products: with the probes' numbers they fit a core's own cache."""


class Heads(NamedTuple):
    """What the probes see of U heads: `gracekv.tree.probed.ProbedHeads`, and weights.

    Fields:
        exponentials: [U*N, P]; mass, key_norms, worth: [U*N]; plain_keys, values: [U*N, d];
            seeing: [N]; before: int64 [N+1]: as there.
        readers: scaled queries [U*d, Q], Q the next multiple of `products_cpu.COLUMNS`.
        top, inverse_total: [U, Q].
        cos, sin: [T, d_rot] rotations of absolute positions.
        region_start: position of the region's first token.
        lambda_z, lambda_m, epsilon: weights of the distortion, float32.
        uniform_base, rule_epsilon, multiplicity: how tokens merge.
    """

    exponentials: Any
    mass: Any
    plain_keys: Any
    key_norms: Any
    values: Any
    worth: Any
    readers: Any
    top: Any
    inverse_total: Any
    seeing: Any
    before: Any
    cos: Any
    sin: Any
    region_start: Any
    lambda_z: Any
    lambda_m: Any
    epsilon: Any
    uniform_base: Any
    rule_epsilon: Any
    multiplicity: Any


class Node(NamedTuple):
    """One node: its head, its tokens in the region, and their first row among all heads'."""

    head: Any
    first: Any
    length: Any
    row: Any


class Scratch(NamedTuple):
    """What a thread works in, for nodes of up to w tokens (W: the next multiple of 16).

    Fields:
        p: [w, Q] the node's exponentials; gram: [w, W] of its values; columns: [d, W] its values;
            worth: [W].
        cross: [4, W] and crossed: [4, Q], for the cross terms of |M|^2.
        z, square: [Q] running Z and |M|^2; key: [d]; plain, weighted: [W] running sums.
        the rest, of waiting intervals: zs, squares, logits, mixed: [R, Q]; shares: [R, W]; keys:
            [R, d]; log_m, v_square: [R]; spans: int64 [R, 4], first and last token, whether a
            suffix, and which; bits: int32 [R, Q].
    """

    p: Any
    gram: Any
    columns: Any
    worth: Any
    cross: Any
    crossed: Any
    z: Any
    square: Any
    key: Any
    plain: Any
    weighted: Any
    zs: Any
    squares: Any
    logits: Any
    mixed: Any
    shares: Any
    keys: Any
    log_m: Any
    v_square: Any
    spans: Any
    bits: Any


@njit(nogil=True)  # type: ignore[untyped-decorator]
def scratch(widest: int, dim: int, padded: int) -> Any:
    """A thread's `Scratch` for nodes of up to `widest` tokens and Q = `padded`."""
    full = (widest + COLUMNS - 1) // COLUMNS * COLUMNS
    many, f = WAITING, np.float32
    return Scratch(
        np.zeros((widest, padded), f), np.empty((widest, full), f), np.zeros((dim, full), f),
        np.zeros(full, f), np.zeros((4, full), f), np.empty((4, padded), f), np.empty(padded, f),
        np.empty(padded, f), np.empty(dim, f), np.empty(full, f), np.empty(full, f),
        np.empty((many, padded), f), np.empty((many, padded), f), np.empty((many, padded), f),
        np.empty((many, padded), f), np.empty((many, full), f), np.empty((many, dim), f),
        np.empty(many, f), np.empty(many, f), np.empty((many, 4), np.int64),
        np.empty((many, padded), np.int32),
    )  # fmt: skip
