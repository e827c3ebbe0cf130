"""What compiled code about nodes reads and works in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.products_cpu import COLUMNS

WAITING = 32
"""Intervals that wait for their products: with the probes' numbers they fit a core's own cache."""


class Heads(NamedTuple):
    """What the probes see of U heads: `gracekv.tree.probe_attention.ProbeAttention`, and weights.

    Attributes:
        exponentials: p [U*N, P].
        mass: [U*N].
        plain_keys: [U*N, d].
        key_norms: [U*N].
        values: [U*N, d].
        worth: [U*N].
        readers: scaled queries [U*d, Q], Q the next multiple of `products_cpu.COLUMNS`.
        top: [U, Q].
        inverse_total: [U, Q].
        seeing: [N].
        before: int64 [N+1].
        cos: [T, d_rot] of the rotations of absolute positions.
        sin: likewise.
        region_start: position of the region's first token.
        lambda_z: weight of the distortion, as are the next two.
        lambda_m: see there.
        epsilon: see there.
        uniform_base: how tokens merge (`gracekv.tree.merge.PrototypeRule`), as are the next two.
        rule_epsilon: see there.
        multiplicity: see there.
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
    """One node.

    Attributes:
        head: which of the U heads.
        first: place of its first token in the region.
        length: tokens.
        row: that of its first token among all heads' tokens.
    """

    head: Any
    first: Any
    length: Any
    row: Any


class Scratch(NamedTuple):
    """What a thread works in, for nodes of up to w tokens (W: the next multiple of 16).

    Attributes:
        p: [w, Q], the node's exponentials.
        gram: [w, W], of its values.
        columns: [d, W], its values.
        worth: [W], of its tokens.
        cross: [4, W], coefficients of the cross terms of |M|^2.
        crossed: [4, Q], the cross terms.
        z: [Q], running Z.
        square: [Q], running |M|^2.
        key: [d], running sum of keys.
        plain: [W], running sum of rows of `gram`.
        weighted: [W], the same times the tokens' worth.
        zs: [R, Q], Z of R waiting intervals; all that follows is theirs.
        squares: [R, Q], |M|^2.
        logits: [R, Q], of the prototypes, and what becomes of them.
        mixed: [R, Q], M.v~.
        shares: [R, W], v~.v of the node's tokens, 0 outside the interval.
        keys: [R, d], merged and rotated.
        log_m: [R], log multiplicity.
        v_square: [R], |v~|^2.
        spans: int64 [R, 4], first and last token, whether a suffix, and which.
        bits: int32 [R, Q], for exponentials.
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
