"""The prototype's distortion, compiled for CPUs.

All threads run the same function and take their next nodes from one counter. A node's results
depend on nothing but the node, so they are the same to the bit on any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import intrinsics, matmul, numba_softmax
from gracekv.kernels.intrinsics import digest, fetch_and_add, inner, pointer
from gracekv.tree.engines import numba_arrays, numba_interval_costs
from gracekv.tree.engines.numba_arrays import HeadArrays, Node, new_scratch
from gracekv.tree.engines.numba_interval_costs import add_intervals, flush, load_node, token_masses

# Nodes that a thread takes at a time.
_NODES = 4


class DistortionArgs(ctypes.Structure):
    """The kernel's arguments: addresses of contiguous arrays, sizes and weights.

    Fields, with V nodes, U heads, N tokens a head, P probes, Q the next multiple of
    `matmul.COLUMNS`:
        exponentials ... sin: as in `numba_arrays.HeadArrays`.
        head, first, length: int64 [V]: head, place in the region, and tokens of each node.
        counter: int64, 0.
        max_length: tokens of the longest node.
        prefix, suffix, mass: float32 [V, max_length], and drop [V], as in `IntervalCosts`.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "exponentials", "probe_mass", "unrotated_keys", "key_norms", "values", "scores",
            "queries", "max_logit", "inverse_sum", "visible_probes", "first_probe", "cos", "sin",
            "head", "first", "length", "counter", "prefix", "suffix", "mass", "drop", "heads",
            "tokens", "probes", "padded_probes", "dim", "positions", "rotary_dim", "region_start",
            "multiplicity", "nodes", "max_length",
        )),
        *((name, ctypes.c_double) for name in (
            "lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon",
        )),
    ]  # fmt: skip


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
def _evaluate(args: Any, v: int, node: Any, heads: Any, scratch: Any, costs: Any) -> None:
    """D of all prefixes and suffixes of a node."""
    n, width = node.length, args.max_length
    prefix = carray(pointer(args.prefix), (args.nodes, width), np.float32)
    suffix = carray(pointer(args.suffix), (args.nodes, width), np.float32)
    mass = carray(pointer(args.mass), (args.nodes, width), np.float32)
    drop = carray(pointer(args.drop), (args.nodes,), np.float32)
    drop[v] = token_masses(node, heads, mass[v])
    pending = add_intervals(node, heads, scratch, False, costs, np.int64(0))
    pending = add_intervals(node, heads, scratch, True, costs, pending)
    flush(node, heads, scratch, costs, pending)
    costs[0, 0] = costs[1, n - 1] = np.float32(0)
    for k in range(n):
        prefix[v, k], suffix[v, k] = costs[0, k], costs[1, k]


@inner(inline="always")
def _work(args: Any) -> None:
    """Take nodes until there are none left."""
    heads, max_length = _heads(args), max(args.max_length, 1)
    head = carray(pointer(args.head), (args.nodes,), np.int64)
    first = carray(pointer(args.first), (args.nodes,), np.int64)
    length = carray(pointer(args.length), (args.nodes,), np.int64)
    scratch = new_scratch(max_length, args.dim, args.padded_probes)
    costs = np.zeros((2, max_length), np.float32)
    counter = pointer(args.counter)
    while True:
        start = fetch_and_add(counter, 0) * _NODES
        if start >= args.nodes:
            return
        for v in range(start, min(start + _NODES, args.nodes)):
            row = head[v] * args.tokens + first[v]
            node = Node(head[v], first[v], length[v], row)
            load_node(node, heads, scratch)
            _evaluate(args, v, node, heads, scratch, costs)


@functools.cache
def distortion_kernel() -> Any:
    """The kernel: a C callback that takes the address of `DistortionArgs`.

    The first call on a machine compiles for 10 to 20 seconds; later ones find the result on disk.
    """
    sources = digest(intrinsics, numba_interval_costs, numba_arrays, matmul, numba_softmax)

    def body(address: Any) -> None:
        _ = sources
        _work(carray(address, (1,), _ARGS)[0])

    return cfunc(types.void(types.voidptr), cache=True)(body)
