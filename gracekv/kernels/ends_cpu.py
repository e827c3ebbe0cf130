"""Judging nodes, and splitting them in the same pass, compiled for CPUs.

All threads run the same function and fetch their next nodes from one counter. What is found of a
node depends on nothing but the node, so results are the same to the bit on any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import (
    cuts_cpu,
    exponential_cpu,
    intrinsics_cpu,
    node_cpu,
    node_data_cpu,
    products_cpu,
)
from gracekv.kernels.cuts_cpu import best_cut, candidates, highest, lifting
from gracekv.kernels.intrinsics_cpu import fetch_and_add, pointer
from gracekv.kernels.node_cpu import gather, masses, read, settle
from gracekv.kernels.node_data_cpu import Heads, Node, scratch
from gracekv.kernels.source_digest import digest

# Nodes that a thread fetches at a time.
_NODES = 4


class Task(ctypes.Structure):
    """What the kernel is to do: addresses, all of contiguous arrays, and sizes.

    Fields, with V nodes, U heads, N tokens a head, P probes, Q the next multiple of
    `products_cpu.COLUMNS`:
        exponentials ... sin: as in `node_data_cpu.Heads`.
        kappa: float64 [T]; 0: it is not read.
        forced: float64 [U, N] floor scores, -inf: no candidate; 0: no floor.
        head, first, length: int64 [V]: head, place in the region, and tokens of each node.
        counter: int64, 0.
        widest: tokens of the longest node.
        mode: `EVALUATE`, `SPLIT` or `SPLIT_ROOTS`.
    To evaluator:
        lifted: int64 [V]: -1, or the token whose two sides are all that is asked for.
        prefix, suffix, mass: float32 [V, widest], and drop [V], as in `IntervalCosts`.
    To split:
        whole: float64 [V], D of each node; of roots it is found, and their drop float32 [V].
        most, reward: as in `cuts_cpu`; most < 0: no cuts.
        lifts: whether a token may be lifted out.
        low, high: int64 [V], cuts counted from the node's start.
        parts: float64 [V, 2], D of the tokens before `low` and of those from `high` on.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "exponentials", "mass_of", "plain_keys", "key_norms", "values", "worth", "readers",
            "top", "inverse_total", "seeing", "before", "cos", "sin", "kappa", "forced", "head",
            "first", "length", "counter", "lifted", "prefix", "suffix", "mass", "drop", "whole",
            "low", "high", "parts", "heads", "tokens", "probes", "padded", "dim", "positions",
            "rotated", "region_start", "multiplicity", "nodes", "widest", "mode", "most", "lifts",
        )),
        *((name, ctypes.c_double) for name in (
            "lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon", "reward",
        )),
    ]  # fmt: skip


EVALUATE, SPLIT, SPLIT_ROOTS = 0, 1, 2

_TASK = np.dtype(Task)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _heads(task: Any) -> Any:
    """The task's `Heads`."""
    f, rows = np.float32, task.heads * task.tokens
    return Heads(
        carray(pointer(task.exponentials), (rows, task.probes), f),
        carray(pointer(task.mass_of), (rows,), f),
        carray(pointer(task.plain_keys), (rows, task.dim), f),
        carray(pointer(task.key_norms), (rows,), f),
        carray(pointer(task.values), (rows, task.dim), f),
        carray(pointer(task.worth), (rows,), f),
        carray(pointer(task.readers), (task.heads * task.dim, task.padded), f),
        carray(pointer(task.top), (task.heads, task.padded), f),
        carray(pointer(task.inverse_total), (task.heads, task.padded), f),
        carray(pointer(task.seeing), (task.tokens,), f),
        carray(pointer(task.before), (task.tokens + 1,), np.int64),
        carray(pointer(task.cos), (task.positions, task.rotated), f),
        carray(pointer(task.sin), (task.positions, task.rotated), f),
        task.region_start,
        f(task.lambda_z),
        f(task.lambda_m),
        f(task.epsilon),
        f(task.uniform_base),
        f(task.rule_epsilon),
        task.multiplicity != 0,
    )


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _judge(task: Any, v: int, node: Any, heads: Any, space: Any, chosen: Any, found: Any) -> None:
    """All ends of a node, or the two sides of the token that will be lifted out."""
    n, width = node.length, task.widest
    lifted = carray(pointer(task.lifted), (task.nodes,), np.int64)[v]
    prefix = carray(pointer(task.prefix), (task.nodes, width), np.float32)
    suffix = carray(pointer(task.suffix), (task.nodes, width), np.float32)
    mass = carray(pointer(task.mass), (task.nodes, width), np.float32)
    drop = carray(pointer(task.drop), (task.nodes,), np.float32)
    drop[v] = masses(node, heads, mass[v]) if lifted < 0 else np.float32(0)
    chosen[:n] = lifted < 0
    if lifted > 0:
        chosen[lifted - 1] = True
    waiting = read(node, heads, space, False, chosen, found, 0)
    chosen[:n] = lifted < 0
    if 0 <= lifted < n - 1:
        chosen[lifted + 1] = True
    waiting = read(node, heads, space, True, chosen, found, waiting)
    settle(node, heads, space, found, waiting)
    found[0, 0] = found[1, n - 1] = np.float32(0)
    for k in range(n):
        prefix[v, k], suffix[v, k] = found[0, k], found[1, k]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _split(
    task: Any, v: int, node: Any, heads: Any, space: Any, chosen: Any, asked: Any, found: Any,
    mass: Any, best: Any,
) -> None:  # fmt: skip
    """The better of a cut and a lifted token; nothing else is judged than what that takes."""
    n, tokens, roots = node.length, task.tokens, task.mode == SPLIT_ROOTS
    kappa = carray(pointer(task.kappa), (task.positions,), np.float64)
    forced = carray(pointer(task.forced), (task.heads * tokens,), np.float64)
    whole = carray(pointer(task.whole), (task.nodes,), np.float64)
    low = carray(pointer(task.low), (task.nodes,), np.int64)
    high = carray(pointer(task.high), (task.nodes,), np.int64)
    parts = carray(pointer(task.parts), (task.nodes, 2), np.float64)
    drop = carray(pointer(task.drop), (task.nodes,), np.float32)

    # Two tokens can only be parted, and a root of one not even that.
    divides, place = n > 2, node.first + heads.region_start
    cuts, lift, must_lift = divides and task.most >= 0, -1, False
    if roots or (divides and task.lifts != 0):
        total = masses(node, heads, mass)
        if roots:
            drop[v] = total
    if divides and task.lifts != 0:
        lift = highest(mass, 0, n)
        if task.forced != 0:
            scored = highest(forced, node.row, n)
            if forced[node.row + scored] > -np.inf:
                lift, must_lift, cuts = scored, True, False
    chosen[:n] = False
    if cuts:
        candidates(kappa, place, n, task.most, chosen, best)

    waiting = 0
    asked[0] = asked[n - 1] = False
    for k in range(1, n - 1):
        asked[k] = chosen[k + 1] or k == lift - 1
    waiting = read(node, heads, space, False, asked, found, waiting)
    for k in range(1, n - 1):
        asked[k] = chosen[k] or k == lift + 1
    asked[0] = roots and n > 1
    waiting = read(node, heads, space, True, asked, found, waiting)
    settle(node, heads, space, found, waiting)
    found[0, 0] = found[1, n - 1] = np.float32(0)

    if roots:
        whole[v] = found[1, 0]
    at = n // 2
    gain, past = -np.inf, at
    if cuts:
        at, gain = best_cut(whole[v], found, n, chosen, kappa, place, task.reward)
        past = at
    if lift >= 0 and (must_lift or lifting(whole[v], found, n, lift) > gain):
        at, past = lift, lift + 1
    low[v], high[v] = at, past
    parts[v, 0] = found[0, at - 1] if divides and at > 0 else 0.0
    parts[v, 1] = found[1, past] if divides and past < n else 0.0


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _work(task: Any) -> None:
    """Fetch nodes until there are none left."""
    heads, widest = _heads(task), max(task.widest, 1)
    head = carray(pointer(task.head), (task.nodes,), np.int64)
    first = carray(pointer(task.first), (task.nodes,), np.int64)
    length = carray(pointer(task.length), (task.nodes,), np.int64)
    space = scratch(widest, task.dim, task.padded)
    chosen, asked = np.empty(widest, np.bool_), np.empty(widest, np.bool_)
    found, mass = np.zeros((2, widest), np.float32), np.empty(widest, np.float32)
    best = np.empty(max(task.most, 1), np.int64)
    counter = pointer(task.counter)
    while True:
        start = fetch_and_add(counter, 0) * _NODES
        if start >= task.nodes:
            return
        for v in range(start, min(start + _NODES, task.nodes)):
            row = head[v] * task.tokens + first[v]
            node = Node(head[v], first[v], length[v], row)
            if node.length > 2 or task.mode != SPLIT:
                gather(node, heads, space)
            if task.mode == EVALUATE:
                _judge(task, v, node, heads, space, chosen, found)
            else:
                _split(task, v, node, heads, space, chosen, asked, found, mass, best)


@functools.cache
def ends() -> Any:
    """The kernel: a C callback that takes a `Task`'s address.

    The first call on a machine compiles for 20 to 30 seconds; later ones find the result on disk.
    """
    sources = digest(
        cuts_cpu, exponential_cpu, intrinsics_cpu, node_cpu, node_data_cpu, products_cpu
    )

    def body(address: Any) -> None:
        _ = sources
        _work(carray(address, (1,), _TASK)[0])

    return cfunc(types.void(types.voidptr), cache=True)(body)
