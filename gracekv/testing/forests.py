"""Random forests, and the check of the frontiers that allocators return."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.testing.promises import hold
from gracekv.tree.base import Forest

Gains = Literal["normal", "heavy", "ties", "zeros"]
_COLUMNS = ("start", "end", "parent", "first_child", "child_count", "tree", "level", "entries")


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
    larger). Built level by level, so a million operations take about a second.

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
    base = int(rng.integers(0, 9))
    bounds = base + np.concatenate([[0], rng.integers(1, slot_tokens + 1, slots).cumsum()])
    units = layers * heads
    start, end = np.tile(bounds[:-1], units), np.tile(bounds[1:], units)
    trees = len(start)
    tree, parent = np.arange(trees), np.full(trees, -1)
    parts: list[tuple[np.ndarray, ...]] = []
    nodes = 0
    while len(start):
        length = end - start
        leaf = (length == 1) | (rng.random(len(start)) < prune)
        inner = np.flatnonzero(~leaf)
        owner, child_start, child_end = _children(rng, start[inner], end[inner], explode)
        count = np.zeros(len(start), dtype=np.int64)
        count[inner] = np.bincount(owner, minlength=len(inner))
        first = np.where(leaf, -1, nodes + len(start) + count.cumsum() - count)
        kept = leaf & (rng.random(len(start)) < whole)
        level = np.full(len(start), len(parts))
        entries = np.where(kept, length, 1)
        parts.append((start, end, parent, first, count, tree, level, entries))
        parent, tree = nodes + inner[owner], tree[inner[owner]]
        nodes += len(start)
        start, end = child_start, child_end
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    start, end, parent, first, count, tree, level, entries = columns
    prefix = np.concatenate([[0], entries.cumsum()])
    leaf = count == 0
    cost = np.where(leaf, 0, prefix[np.where(leaf, 0, first + count)])
    cost -= np.where(leaf, 0, prefix[np.where(leaf, 0, first)] + entries)
    named = dict(zip(_COLUMNS, columns, strict=True))
    named |= {"relevance": rng.random(nodes), "distortion": rng.random(nodes)}
    named |= {"drop": rng.random(trees), "add_gain": _gains(rng, gains, entries[:trees])}
    named["split_gain"] = np.where(leaf, 0.0, _gains(rng, gains, cost))
    tensors: dict[str, Any] = {name: torch.from_numpy(x) for name, x in named.items()}
    return Forest(layers=layers, heads=heads, slots=slots, **tensors)


def _children(
    rng: Generator, start: np.ndarray, end: np.ndarray, explode: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Owner, start and end of the children, by owner and start; every node has two or more."""
    length = end - start
    apart = rng.random(len(start)) < explode
    # Extraction and the binary cut are both two cuts x <= y; a binary one has x = y.
    extract = rng.random(len(start)) < 0.5
    token = start + rng.integers(0, length)
    cut = start + rng.integers(1, np.maximum(length, 2))
    x, y = np.where(extract, token, cut), np.where(extract, token + 1, cut)
    edges = np.stack([start, x, y, end], 1)
    owner = np.repeat(np.arange(len(start)), 3)
    begins, ends = edges[:, :3].ravel(), edges[:, 1:].ravel()
    keep = (begins < ends) & ~apart[owner]
    sizes = np.where(apart, length, 0)
    tokens_owner = np.repeat(np.arange(len(start)), sizes)
    within = np.arange(len(tokens_owner)) - np.repeat(sizes.cumsum() - sizes, sizes)
    tokens = start[tokens_owner] + within
    owner = np.concatenate([owner[keep], tokens_owner])
    begins = np.concatenate([begins[keep], tokens])
    ends = np.concatenate([ends[keep], tokens + 1])
    order = np.lexsort((begins, owner))
    return owner[order], begins[order], ends[order]


def _gains(rng: Generator, kind: Gains, cost: np.ndarray) -> np.ndarray:
    """float64 gain of operations of these costs."""
    size = len(cost)
    if kind == "normal":
        return rng.normal(0.5, 1.0, size)
    if kind == "heavy":
        return rng.lognormal(0.0, 3.0, size) * np.where(rng.random(size) < 0.1, -1, 1)
    if kind == "ties":
        unit = rng.integers(-1, 4, size)
    else:
        unit = np.where(rng.random(size) < 0.9, -rng.integers(0, 2, size), 1)
    return np.asarray(unit * cost, dtype=np.float64)


def check_frontier(frontier: Frontier, quota: Tensor | None = None) -> None:
    """Raise `AssertionError`, with the reason, if `frontier` breaks an invariant.

    Split nodes have children and are reached, the budget and `quota` ([L, G]) hold, the floor is
    part of what is spent, the bound is not below the utility, and no token of a head lies in two
    kept intervals.
    """
    forest, added, split, kept = frontier.forest, frontier.added, frontier.split, frontier.kept
    for name, chosen, size in (("added", added, forest.trees), ("split", split, forest.nodes)):
        fits = chosen.shape == (size,) and chosen.dtype == torch.bool
        hold(fits, f"{name} must be bool [{size}]; got {chosen.shape}")
    hold(not bool((split & forest.is_leaf).any()), "a leaf is split")
    unreached = split[: forest.trees] & ~added
    hold(not bool(unreached.any()), "a root is split that was never added")
    above = forest.parent[forest.trees :]
    unreached = split[forest.trees :] & ~split[above]
    hold(not bool(unreached.any()), "a node is split although its parent is not")
    spent = frontier.spent
    hold(spent <= frontier.budget, f"{spent} entries spent of a budget of {frontier.budget}")
    floor_spent = frontier.floor_spent
    hold(0 <= floor_spent <= spent, f"floor_spent {floor_spent} is not within spent {spent}")
    if quota is not None:
        held = frontier.entries_per_head()
        within = bool((held <= quota.to(kept.device)).all())
        hold(within, f"heads hold {held.tolist()} of quotas {quota.tolist()}")
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
    once = bool((covered.view(-1, tokens + 1).cumsum(1) <= 1).all())
    hold(once, "a token lies in two kept intervals of its head")


def check_forest(forest: Forest) -> None:
    """Raise `AssertionError`, with the reason, unless `forest` is a forest with finite gains.

    The children of a node follow one another and cover it; single tokens are leaves; a node's
    physical entries are 1 or its tokens; gains and distortions are finite, distortions >= 0.
    """
    inner = (~forest.is_leaf).nonzero().flatten().cpu()
    first, count = forest.first_child.cpu()[inner], forest.child_count.cpu()[inner]
    start, end, parent = forest.start.cpu(), forest.end.cpu(), forest.parent.cpu()
    last = first + count - 1
    covers = torch.equal(start[first], start[inner]) and torch.equal(end[last], end[inner])
    hold(covers, "children do not begin and end where their node does")
    below = (parent >= 0).nonzero().flatten()
    sibling = below[1:][parent[below][1:] == parent[below][:-1]]
    hold(torch.equal(start[sibling], end[sibling - 1]), "children do not follow one another")
    filled = bool((count >= 2).all()) and bool((forest.length > 0).all())
    hold(filled, "a node has one child, or is empty")
    known = (forest.entries == 1) | (forest.entries == forest.length)
    hold(bool(known.all()), "a node's entries are neither 1 nor its tokens")
    for name in ("relevance", "distortion", "drop", "add_gain", "split_gain"):
        hold(bool(getattr(forest, name).isfinite().all()), f"{name} holds NaN or infinity")
    hold(bool((forest.distortion >= 0).all()), "a distortion is below 0")
