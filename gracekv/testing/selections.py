"""Random forests, and checks of partitions, forests, frontiers and compressed caches."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill, Region
from gracekv.segment.base import Partition
from gracekv.tree.base import Forest


def hold(promise: object, broken: str) -> None:
    """Raise `AssertionError` with the message `broken` unless `promise`, which may be a tensor."""
    if not promise:
        raise AssertionError(broken)


def check_run(run: Run, prefill: Prefill, recent: int | None = None) -> None:
    """Raise `AssertionError` unless the run is within its budget and kept all required entries.

    Every head holds the prefix, the last `recent` context tokens (default: the run's own recent
    window) and the suffix, with prefix and suffix bit for bit at multiplicity 1; positions strictly
    increase; the accounting matches the entries.
    """
    spans, accounting = prefill.spans, run.accounting
    recent = accounting.recent if recent is None else recent
    spent, budget = accounting.spent, accounting.budget
    hold(spent <= budget, f"{spent} entries of a budget of {budget}")
    spent, budget = accounting.spent_bytes or 0, accounting.budget_bytes or 0
    hold(spent <= budget, f"{spent} bytes of a budget of {budget}")
    covered = spans.length - 1
    fixed = [*range(spans.context_start), *range(spans.context_end, covered)]
    # Without a suffix, decoding feeds the last context token again.
    window = range(spans.context_end - recent, min(spans.context_end, covered))
    fed_again = int(spans.context_end == spans.length)
    for layer, packed in enumerate(run.cache.layers):
        for head in range(packed.heads):
            where = f"layer {layer}, head {head}"
            keys, values, positions, log_m = packed.head(head)
            hold((positions.diff() > 0).all(), f"{where}: positions do not strictly increase")
            place = {int(position): i for i, position in enumerate(positions)}
            missing = [t for t in (*fixed, *window) if t not in place]
            hold(not missing, f"{where}: positions {missing} are missing")
            rows = torch.tensor([place[t] for t in fixed], dtype=torch.int64)
            same = not log_m[rows].any()
            for got, states in ((keys, prefill.keys), (values, prefill.values)):
                given = states[layer][head, fixed]
                # Entries of a quantised layer are float32.
                same &= torch.equal(got[rows].to(given), given)
            hold(same, f"{where}: prefix or suffix was changed")
            held, told = len(place) - len(fixed) + fed_again, int(accounting.entries[layer, head])
            hold(held == told, f"{where}: {held} context entries packed, {told} accounted for")


def check_partition(partition: Partition, region: Region, length: int) -> None:
    """Check that a segmenter's `partition` of `region` fulfils the contract.

    `length` is T, the tokens of the whole sequence. Raises `AssertionError` with the first broken
    rule: int64 bounds on the CPU that strictly increase from the region's start to its end, and a
    curvature that is None or one finite float per token of the sequence.
    """
    bounds, kappa = partition.bounds, partition.curvature
    got = f"{bounds.dtype} {bounds.tolist()} on {bounds.device}"
    whole = bounds.dtype == torch.int64 and bounds.device.type == "cpu" and bounds.ndim == 1
    hold(whole, f"bounds must be one-dimensional int64 on the CPU; got {got}.")
    reaches = (int(bounds[0]), int(bounds[-1])) == (region.start, region.end)
    hold(reaches, f"bounds must run from end to end of {region}; got {got}.")
    hold((partition.lengths > 0).all(), f"bounds must strictly increase; got {got}.")
    if kappa is not None:
        own = f"{kappa.dtype} {list(kappa.shape)}"
        fits = kappa.shape == (length,) and kappa.is_floating_point()
        hold(fits, f"curvature must be float [{length}]; got {own}.")
        hold(kappa.isfinite().all(), "curvature must be finite.")


Gains = Literal["normal", "heavy", "ties", "zeros"]


def random_forest(
    seed: int,
    *,
    layers: int = 2,
    heads: int = 2,
    slots: int = 3,
    slot_tokens: int = 12,
    gains: Gains = "normal",
    explode: float = 0.1,
    prune: float = 0.1,
    whole: float = 0.1,
) -> Forest:
    """A forest with the structure of a real one and random gains.

    Nodes are cut in two, have one token extracted, or split into all their tokens (costs 1, 2 and
    larger).

    Args:
        seed: seed of the random numbers.
        layers: L.
        heads: G.
        slots: J; slot lengths are drawn from 1 to `slot_tokens` and shared by all heads.
        slot_tokens: longest slot.
        gains: "normal" (both signs), "heavy" (log-normal, with a few negative), "ties" (small
            whole utilities, 0 and negative included) or "zeros" (nine tenths are 0 or negative).
        explode: chance that a node splits into all its tokens at once.
        prune: chance that a node of several tokens is a leaf.
        whole: chance that such a leaf keeps its original tokens (`entries` = its length).
    """
    rng = np.random.default_rng(seed)
    bounds = rng.integers(0, 9) + np.r_[0, rng.integers(1, slot_tokens + 1, slots).cumsum()]
    trees = layers * heads * slots
    roots = np.tile(np.stack([bounds[:-1], bounds[1:]], 1), (layers * heads, 1)).tolist()
    nodes = [(*root, -1, number, 0) for number, root in enumerate(roots)]
    first, count, entries = [], [], []
    # Nodes are appended during the iteration, so levels and siblings are contiguous.
    for at, (start, end, _, tree, level) in enumerate(nodes):
        leaf = end - start == 1 or rng.random() < prune
        cuts = [] if leaf else _cuts(rng, start, end, explode)
        first.append(-1 if leaf else len(nodes))
        count.append(max(0, len(cuts) - 1))
        entries.append(end - start if leaf and rng.random() < whole else 1)
        nodes += [(*child, at, tree, level + 1) for child in itertools.pairwise(cuts)]
    cost = [sum(entries[a : a + n]) - own for a, n, own in zip(first, count, entries, strict=True)]
    split_gain = _gains(rng, gains, np.array(cost))
    split_gain[np.array(count) == 0] = 0.0
    named = dict(zip(("start", "end", "parent", "tree", "level"), np.array(nodes).T, strict=True))
    named |= {"first_child": np.array(first), "child_count": np.array(count)}
    named |= {"entries": np.array(entries), "split_gain": split_gain, "drop": rng.random(trees)}
    named |= {name: rng.random(len(nodes)) for name in ("relevance", "distortion")}
    named["add_gain"] = _gains(rng, gains, named["entries"][:trees])
    tensors: dict[str, Any] = {name: torch.from_numpy(x.copy()) for name, x in named.items()}
    return Forest(layers=layers, heads=heads, slots=slots, **tensors)


def _cuts(rng: Generator, start: int, end: int, explode: float) -> list[int]:
    """Borders of the children: all tokens, one token and the rest, or two parts."""
    if rng.random() < explode:
        return list(range(start, end + 1))
    token, cut = (int(rng.integers(low, end)) for low in (start, start + 1))
    inner = (token, token + 1) if rng.random() < 0.5 else (cut,)
    return sorted({start, *inner, end})


def _gains(rng: Generator, kind: Gains, cost: np.ndarray) -> np.ndarray:
    """float64 gains of operations with these costs."""
    size = len(cost)
    if kind == "normal":
        return rng.normal(0.5, 1.0, size)
    if kind == "heavy":
        return rng.lognormal(0.0, 3.0, size) * np.where(rng.random(size) < 0.1, -1, 1)
    unit = rng.integers(-1, 4, size)
    if kind == "zeros":
        unit = np.where(rng.random(size) < 0.9, -rng.integers(0, 2, size), 1)
    return np.asarray(unit * cost, dtype=np.float64)


def check_frontier(frontier: Frontier, quota: Tensor | None = None) -> None:
    """Raise `AssertionError`, with the reason, if `frontier` violates an invariant.

    Split nodes have children and are reachable, spending is within the budget and `quota`
    ([L, G]) and includes the floor's, the bound is not below the utility, and no token of a head
    is in two kept intervals.
    """
    forest, added, split, kept = frontier.forest, frontier.added, frontier.split, frontier.kept
    for name, chosen, size in (("added", added, forest.trees), ("split", split, forest.nodes)):
        fits = chosen.shape == (size,) and chosen.dtype == torch.bool
        hold(fits, f"{name} must be bool [{size}]; got {chosen.shape}")
    hold(not (split & forest.is_leaf).any(), "a leaf is split")
    unreached = split & ~frontier.reached
    hold(not unreached[: forest.trees].any(), "a root that was never added is split")
    hold(not unreached[forest.trees :].any(), "a node is split although its parent is not")
    spent, floor_spent = frontier.spent, frontier.floor_spent
    hold(spent <= frontier.budget, f"{spent} entries spent of a budget of {frontier.budget}")
    hold(0 <= floor_spent <= spent, f"floor_spent {floor_spent} is not within spent {spent}")
    if quota is not None:
        held = frontier.entries_per_head()
        obeyed = (held <= quota.to(kept.device)).all()
        hold(obeyed, f"heads hold {held.tolist()} of quotas {quota.tolist()}")
    if frontier.bound is not None:
        within = frontier.utility <= frontier.bound * (1 + 1e-9)
        hold(within, f"utility {frontier.utility} exceeds its bound {frontier.bound}")
    first = int(forest.start.min())
    tokens = int(forest.end.max()) - first
    covered = torch.zeros(forest.layers * forest.heads * (tokens + 1), dtype=torch.int64)
    row = (forest.head_of_node()[kept] * (tokens + 1)).cpu() - first
    ones = torch.ones_like(row)
    covered.index_add_(0, row + forest.start[kept].cpu(), ones)
    covered.index_add_(0, row + forest.end[kept].cpu(), -ones)
    once = (covered.view(-1, tokens + 1).cumsum(1) <= 1).all()
    hold(once, "a token is in two kept intervals of its head")


def check_forest(forest: Forest) -> None:
    """Raise `AssertionError`, with the reason, unless `forest` is a forest with finite gains.

    The children of a node are contiguous and cover it; single tokens are leaves; a node has 1
    physical entry or one per token; gains and distortions are finite, distortions >= 0.
    """
    inner = (~forest.is_leaf).nonzero().flatten().cpu()
    first, count = forest.first_child.cpu()[inner], forest.child_count.cpu()[inner]
    start, end, parent = forest.start.cpu(), forest.end.cpu(), forest.parent.cpu()
    last = first + count - 1
    covers = torch.equal(start[first], start[inner]) and torch.equal(end[last], end[inner])
    hold(covers, "children do not cover their node")
    below = (parent >= 0).nonzero().flatten()
    sibling = below[1:][parent[below][1:] == parent[below][:-1]]
    hold(torch.equal(start[sibling], end[sibling - 1]), "children are not contiguous")
    hold((count >= 2).all() and (forest.length > 0).all(), "a node has one child, or is empty")
    known = (forest.entries == 1) | (forest.entries == forest.length)
    hold(known.all(), "a node's entries are neither 1 nor its tokens")
    for name in ("relevance", "distortion", "drop", "add_gain", "split_gain"):
        hold(getattr(forest, name).isfinite().all(), f"{name} holds NaN or infinity")
    hold((forest.distortion >= 0).all(), "a distortion is below 0")
