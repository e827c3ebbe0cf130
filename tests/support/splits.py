"""Compares trees of two computed paths: splits may differ only if the float64 reference ties."""

from collections.abc import Sequence

import torch

from gracekv.tree import Forest, Nodes, Prototype, TreeBatch, TreeContext
from gracekv.tree.base import Split
from gracekv.tree.engines.reference import ReferenceDistortion

Span = tuple[int, int]
Spans = Sequence[Span]

# Gains are differences of float32 distortions, whose errors are 1e-4 of the operands.
SPLITS = 5e-4


def children_of(forest: Forest, tree: int) -> dict[Span, list[Span]]:
    """The children of each inner node of one tree, as token spans."""
    spans = list(zip(forest.start.tolist(), forest.end.tolist(), strict=True))
    found = {}
    for v in (forest.tree == tree).nonzero().flatten().tolist():
        if forest.child_count[v]:
            first = int(forest.first_child[v])
            found[spans[v]] = spans[first : first + int(forest.child_count[v])]
    return found


def assert_same_tree(
    context: TreeContext,
    head: int,
    got: dict[Span, list[Span]],
    want: dict[Span, list[Span]],
    root: Span,
    reward: float,
) -> None:
    """Two trees of one slot of `head` (of all layers' heads): the same down to any tie."""
    pending = [root]
    while pending:
        node = pending.pop()
        if got.get(node) == want.get(node):
            pending.extend(got.get(node, ()))
        else:
            assert node in got, f"{node} is split in one tree only"
            assert node in want, f"{node} is split in one tree only"
            assert_splits_tie(context, head, node, got[node], want[node], reward)


def assert_same_splits(
    context: TreeContext, batch: TreeBatch, nodes: Nodes, got: Split, want: Split, reward: float
) -> None:
    """Two splits of the same nodes: the same children up to ties, with the same distortion."""
    if _children(got) == _children(want):
        scale = float(want.distortion.max()) if want.distortion.numel() else 0.0
        known = (x.distortion[x.start < x.end] for x in (got, want))
        torch.testing.assert_close(*known, rtol=1e-5, atol=1e-6 * scale)
        return
    slots = context.partition.slots
    for row, (one, two) in enumerate(zip(_children(got), _children(want), strict=True)):
        if one != two:
            tree = int(nodes.tree[row])
            first = int(batch.slot_start[tree])
            node, one, two = (
                [(a + first, b + first) for a, b in spans]
                for spans in ([(int(nodes.start[row]), int(nodes.end[row]))], one, two)
            )
            assert_splits_tie(context, int(batch.tree_id[tree]) // slots, node[0], one, two, reward)


def _children(split: Split) -> list[list[Span]]:
    rows = zip(split.start.tolist(), split.end.tolist(), strict=True)
    return [[(a, b) for a, b in zip(*row, strict=True) if a < b] for row in rows]


def assert_splits_tie(
    context: TreeContext, head: int, node: Span, one: Spans, two: Spans, reward: float
) -> None:
    """Both gain as much per entry, Eq. (T10), or extract tokens of equal probe mass, Eq. (T9)."""
    layer, g = divmod(head, context.prefill.kv_heads)
    reference = ReferenceDistortion(context, layer, g, Prototype())
    ratings = [_ratings(reference, node, children, reward) for children in (one, two)]
    gap, scale = min((abs(a - b), max(sa, sb)) for a, sa in ratings[0] for b, sb in ratings[1])
    if gap <= SPLITS * scale:
        return
    masses = reference.masses(*node)
    lifted = [[masses[a - node[0]] for a, b in spans if b - a == 1] for spans in (one, two)]
    assert any(abs(a - b) <= SPLITS * max(a, b) for a in lifted[0] for b in lifted[1]), (
        f"head {head}, tokens {node}: {one} and {two} gain {ratings}: no tie"
    )


def _ratings(
    reference: ReferenceDistortion, node: Span, children: Spans, reward: float
) -> list[tuple[float, float]]:
    """Gain per added entry, and the size of its operands: as a cut, as an extraction, or both."""
    parts = [reference.node(*node), *(reference.node(*child) for child in children)]
    plain, scale = (parts[0] - sum(parts[1:])) / (len(children) - 1), sum(parts)
    found = [(plain, scale)] if any(b - a == 1 for a, b in children) else []
    if len(children) == 2:
        bonus, curvature = 0.0, reference.context.curvature
        if reward and curvature is not None:
            kappa = curvature[node[0] : node[1]].double()
            span = float(kappa.max() - kappa.min())
            bonus = float(kappa[children[0][1] - node[0]] - kappa.min()) / span if span else 0.0
        found.append((plain + reward * bonus, scale))
    return found
