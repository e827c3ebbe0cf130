"""The arrays that the compiled distortion reads and writes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from gracekv.kernels.intrinsics import inner
from gracekv.kernels.matmul import COLUMNS

MAX_PENDING = 32
"""Number of intervals whose products are computed together: their data fit in a core's cache."""


class HeadArrays(
    namedtuple(
        "HeadArrays",
        "exponentials mass unrotated_keys key_norms values scores queries max_logit "
        "inverse_sum visible_probes first_probe cos sin region_start lambda_z lambda_m "
        "epsilon uniform_base rule_epsilon multiplicity",
    )
):
    """U heads: `gracekv.tree.engines.base.ProbeAttention`, and the distortion's weights.

    Attributes:
        exponentials: p [U*N, P].
        mass: [U*N].
        unrotated_keys: [U*N, d].
        key_norms: [U*N].
        values: [U*N, d].
        scores: [U*N].
        queries: transposed and scaled [U*d, Q], Q the next multiple of `matmul.COLUMNS`.
        max_logit: [U, Q].
        inverse_sum: [U, Q].
        visible_probes: [N].
        first_probe: int64 [N+1].
        cos: [T, d_rot], of absolute positions.
        sin: [T, d_rot].
        region_start: absolute position of the region's first token.
        lambda_z: weight of the partition error.
        lambda_m: weight of the value-aggregate error.
        epsilon: added to both denominators.
        uniform_base: field of `gracekv.tree.merge.PrototypeRule`.
        rule_epsilon: field `epsilon` of the rule.
        multiplicity: field of the rule.
    """


class Node(namedtuple("Node", "head first length row")):
    """One node.

    Attributes:
        head: index among the U heads.
        first: index of its first token in the region.
        length: tokens.
        row: row of its first token in arrays over all heads' tokens.
    """


class Scratch(
    namedtuple(
        "Scratch",
        "p gram values_t scores cross cross_terms z m_square key_sum gram_sum "
        "weighted_gram_sum pending_z pending_m_square logits m_dot_v v_products mean_keys "
        "log_m v_square spans is_cut wanted costs mass top",
    )
):
    """Scratch memory of a thread, for nodes of up to w tokens (W: the next multiple of 16).

    Attributes:
        p: [w, Q], the node's exponentials.
        gram: [w, W], Gram matrix of its values.
        values_t: [d, W], its values, transposed.
        scores: [W], of its tokens.
        cross: [4, W], coefficients of the cross terms of |M|^2.
        cross_terms: [4, Q], the cross terms.
        z: [Q], running Z.
        m_square: [Q], running |M|^2.
        key_sum: [d], running sum of keys.
        gram_sum: [W], running sum of rows of `gram`.
        weighted_gram_sum: [W], the same, weighted by the tokens' scores.
        pending_z: [R, Q], Z of R pending intervals, which the following fields also describe.
        pending_m_square: [R, Q], |M|^2.
        logits: [R, Q], of the prototypes; then Z~, then errors.
        m_dot_v: [R, Q], M.v~.
        v_products: [R, W], v~.v_t of the node's tokens, 0 outside the interval.
        mean_keys: [R, d], rotated to the mean position.
        log_m: [R], log multiplicity.
        v_square: [R], |v~|^2.
        spans: int64 [R, 4], first and last token, row and column of `costs`.
        is_cut: bool [w], tokens at which the node may be cut.
        wanted: bool [w], ends (or starts) of the intervals whose D is computed.
        costs: [2, w], D of prefixes and suffixes.
        mass: [w], of the node's tokens.
        top: int64 [cuts or more], for `mark_cuts`.
    """


@inner()
def new_scratch(max_length: int, dim: int, padded_probes: int, cuts: int) -> Any:
    """A thread's `Scratch` for nodes of up to `max_length` tokens and Q = `padded_probes`."""
    width = (max_length + COLUMNS - 1) // COLUMNS * COLUMNS
    rows, probes, f = MAX_PENDING, padded_probes, np.float32
    return Scratch(
        np.zeros((max_length, probes), f), np.empty((max_length, width), f),
        np.zeros((dim, width), f), np.zeros(width, f), np.zeros((4, width), f),
        np.empty((4, probes), f), np.empty(probes, f), np.empty(probes, f), np.empty(dim, f),
        np.empty(width, f), np.empty(width, f), np.empty((rows, probes), f),
        np.empty((rows, probes), f), np.empty((rows, probes), f), np.empty((rows, probes), f),
        np.empty((rows, width), f), np.empty((rows, dim), f), np.empty(rows, f), np.empty(rows, f),
        np.empty((rows, 4), np.int64), np.empty(max_length, np.bool_),
        np.empty(max_length, np.bool_), np.zeros((2, max_length), f), np.empty(max_length, f),
        np.empty(max(cuts, 1), np.int64),
    )  # fmt: skip
