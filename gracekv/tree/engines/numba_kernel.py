"""The prototype's distortion, and splits in the same pass, compiled for CPUs.

All threads run the same function and take their next nodes from one counter. A node's results
depend only on the node, so they are bitwise equal for any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any

import numpy as np
from numba import carray, cfunc, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import intrinsics, matmul, numba_softmax, row_vectors
from gracekv.kernels.compiled import argument_fields, cached
from gracekv.kernels.intrinsics import digest, fetch_and_add, inner, pointer
from gracekv.tree.engines import numba_arrays, numba_interval_costs, numba_split_choice
from gracekv.tree.engines.numba_arrays import HeadArrays, Node, new_scratch
from gracekv.tree.engines.numba_interval_costs import add_intervals, flush, load_node, token_masses
from gracekv.tree.engines.numba_split_choice import argmax, best_cut, extraction_utility, mark_cuts

# Nodes that a thread takes at a time.
_NODES = 4


class DistortionArgs(ctypes.Structure):
    """The kernel's arguments: addresses of contiguous arrays, sizes and weights.

    Fields, with V nodes, U heads, N tokens per head, P probes, Q the next multiple of
    `matmul.COLUMNS`:
        exponentials ... sin: as in `numba_arrays.HeadArrays`.
        kappa: float64 [T], or 0 if it is not read.
        forced: float64 [U, N] floor scores, -inf for no candidate; or 0 without a floor.
        head, first, length: int64 [V]: head, index in the region, and tokens of each node.
        counter: int64, 0.
        max_length: tokens of the longest node.
    To evaluate nodes, it also writes:
        intervals: float32 [2, V, max_length], mass [V, max_length] and drop [V], as costs, mass and
            drop of `IntervalCosts`.
    To split nodes, `intervals` is 0, and it also reads and writes:
        node_cost: float64 [V], D of each node; filled for roots.
        drop: float32 [V], filled for roots; 0 for others.
        cuts, reward: as in `numba_split_choice`; cuts < 0: nodes are not cut.
        extracts: whether a token may be extracted.
        low, high: int64 [V], cuts relative to the node's start.
        part_costs: float64 [V, 2], D of the tokens before `low` and of those from `high` on.
    """

    _fields_ = argument_fields(
        "exponentials probe_mass unrotated_keys key_norms values scores queries max_logit "
        "inverse_sum visible_probes first_probe cos sin kappa forced head first length counter "
        "intervals mass drop node_cost low high part_costs heads tokens probes padded_probes dim "
        "positions rotary_dim region_start multiplicity nodes max_length cuts extracts",
        "lambda_z lambda_m epsilon uniform_base rule_epsilon reward",
    )


_ARGS = np.dtype(DistortionArgs)


@inner()
def _heads(args: Any) -> Any:
    """The arrays and weights of the arguments."""
    f, rows = np.float32, args.heads * args.tokens
    return HeadArrays(
        carray(pointer(args.exponentials), (rows, args.probes), f),
        carray(pointer(args.probe_mass), (rows,), f),
        carray(pointer(args.unrotated_keys), (rows, args.dim), f),
        carray(pointer(args.key_norms), (rows,), f),
        carray(pointer(args.values), (rows, args.dim), f),
        carray(pointer(args.scores), (rows,), f),
        carray(pointer(args.queries), (args.heads * args.dim, args.padded_probes), f),
        carray(pointer(args.max_logit), (args.heads, args.padded_probes), f),
        carray(pointer(args.inverse_sum), (args.heads, args.padded_probes), f),
        carray(pointer(args.visible_probes), (args.tokens,), f),
        carray(pointer(args.first_probe), (args.tokens + 1,), np.int64),
        carray(pointer(args.cos), (args.positions, args.rotary_dim), f),
        carray(pointer(args.sin), (args.positions, args.rotary_dim), f),
        args.region_start,
        f(args.lambda_z),
        f(args.lambda_m),
        f(args.epsilon),
        f(args.uniform_base),
        f(args.rule_epsilon),
        args.multiplicity != 0,
    )


@inner(inline="always")
def _evaluate(args: Any, v: int, node: Any, heads: Any, scratch: Any) -> None:
    """D of all prefixes and suffixes of a node."""
    n, width, costs = node.length, args.max_length, scratch.costs
    intervals = carray(pointer(args.intervals), (2, args.nodes, width), np.float32)
    mass = carray(pointer(args.mass), (args.nodes, width), np.float32)
    drop = carray(pointer(args.drop), (args.nodes,), np.float32)
    drop[v] = token_masses(node, heads, mass[v])
    scratch.wanted[:n] = True
    pending = add_intervals(node, heads, scratch, False, np.int64(0))
    pending = add_intervals(node, heads, scratch, True, pending)
    flush(node, heads, scratch, pending)
    costs[0, 0] = costs[1, n - 1] = np.float32(0)
    for k in range(n):
        intervals[0, v, k], intervals[1, v, k] = costs[0, k], costs[1, k]


@inner(inline="always")
def _split(args: Any, v: int, node: Any, heads: Any, scratch: Any) -> None:
    """The better of a cut and an extraction; only costs that are compared are computed."""
    n, tokens, roots = node.length, args.tokens, args.drop != 0
    is_cut, wanted, costs, mass = scratch.is_cut, scratch.wanted, scratch.costs, scratch.mass
    kappa = carray(pointer(args.kappa), (args.positions,), np.float64)
    forced = carray(pointer(args.forced), (args.heads * tokens,), np.float64)
    node_cost = carray(pointer(args.node_cost), (args.nodes,), np.float64)
    low = carray(pointer(args.low), (args.nodes,), np.int64)
    high = carray(pointer(args.high), (args.nodes,), np.int64)
    part_costs = carray(pointer(args.part_costs), (args.nodes, 2), np.float64)
    drop = carray(pointer(args.drop), (args.nodes,), np.float32)

    # Two tokens have only one split, and a root of one has none.
    has_choice, position = n > 2, node.first + heads.region_start
    cuts, token, must_extract = has_choice and args.cuts >= 0, -1, False
    if roots or (has_choice and args.extracts != 0):
        total = token_masses(node, heads, mass)
        if roots:
            drop[v] = total
    if has_choice and args.extracts != 0:
        token = argmax(mass, 0, n)
        if args.forced != 0:
            candidate = argmax(forced, node.row, n)
            if forced[node.row + candidate] > -np.inf:
                token, must_extract, cuts = candidate, True, False
    is_cut[:n] = False
    if cuts:
        mark_cuts(kappa, position, n, args.cuts, is_cut, scratch.top)

    wanted[0] = wanted[n - 1] = False
    for k in range(1, n - 1):
        wanted[k] = is_cut[k + 1] or k == token - 1
    pending = add_intervals(node, heads, scratch, False, np.int64(0))
    for k in range(1, n - 1):
        wanted[k] = is_cut[k] or k == token + 1
    wanted[0] = roots and n > 1
    pending = add_intervals(node, heads, scratch, True, pending)
    flush(node, heads, scratch, pending)
    costs[0, 0] = costs[1, n - 1] = np.float32(0)

    if roots:
        node_cost[v] = costs[1, 0]
    first = n // 2
    gain, last = -np.inf, first
    if cuts:
        first, gain = best_cut(node_cost[v], costs, n, is_cut, kappa, position, args.reward)
        last = first
    if token >= 0 and (must_extract or extraction_utility(node_cost[v], costs, n, token) > gain):
        first, last = token, token + 1
    low[v], high[v] = first, last
    part_costs[v, 0] = costs[0, first - 1] if has_choice and first > 0 else 0.0
    part_costs[v, 1] = costs[1, last] if has_choice and last < n else 0.0


@inner(inline="always")
def _work(args: Any) -> None:
    """Take nodes until there are none left."""
    heads, max_length = _heads(args), max(args.max_length, 1)
    head = carray(pointer(args.head), (args.nodes,), np.int64)
    first = carray(pointer(args.first), (args.nodes,), np.int64)
    length = carray(pointer(args.length), (args.nodes,), np.int64)
    scratch = new_scratch(max_length, args.dim, args.padded_probes, args.cuts)
    counter = pointer(args.counter)
    while True:
        start = fetch_and_add(counter, 0) * _NODES
        if start >= args.nodes:
            return
        for v in range(start, min(start + _NODES, args.nodes)):
            node = Node(head[v], first[v], length[v], head[v] * args.tokens + first[v])
            if node.length > 2 or args.drop != 0:
                load_node(node, heads, scratch)
            if args.intervals != 0:
                _evaluate(args, v, node, heads, scratch)
            else:
                _split(args, v, node, heads, scratch)


@cache
def distortion_kernel() -> Any:
    """The kernel: a C callback that takes the address of `DistortionArgs`.

    The first call on a machine compiles for 10 to 20 seconds; later ones load the result from disk.
    """
    shared = intrinsics, matmul, numba_softmax, row_vectors
    sources = digest(*shared, numba_arrays, numba_interval_costs, numba_split_choice)

    def body(address: Any) -> None:
        _ = sources
        _work(carray(address, (1,), _ARGS)[0])

    return cached(partial(cfunc, types.void(types.voidptr)), body)
