"""The token interval of each entry of a packed layer, in packing order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv import ragged
from gracekv.allocate.base import Frontier
from gracekv.prefill import Prefill


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """The entries of one layer, head after head: prefix, kept nodes, recent window, suffix.

    Attributes:
        head: int64 [E], KV head of each entry.
        start: int64 [E], the first absolute position of its interval.
        end: int64 [E], exclusive; end - start > 1 only for merged nodes.
        offsets: int64 [G+1] on the CPU.
        origin: first compressible position, where R^tok starts.
    """

    head: Tensor
    start: Tensor
    end: Tensor
    offsets: Tensor
    origin: int


def layer_layouts(prefill: Prefill, frontier: Frontier) -> Iterator[LayerLayout]:
    """Layouts of all layers; nodes that are kept token by token become one entry a token.

    The last prompt token is left out: decoding feeds it again.
    """
    node = torch.nonzero(frontier.kept).flatten()
    layer = frontier.forest.head_of_node()[node] // prefill.kv_heads
    counts = torch.bincount(layer, minlength=prefill.layers).tolist()
    by_layer = node[layer.argsort(stable=True)].split(counts)
    region = _region(frontier)
    for layer_index, nodes in enumerate(by_layer):
        yield _layout(prefill, frontier, layer_index, nodes, region)


def _layout(
    prefill: Prefill, frontier: Frontier, layer: int, nodes: Tensor, region: tuple[int, int]
) -> LayerLayout:
    """Layout of `layer`, whose kept nodes are `nodes` (int64 [V])."""
    forest, spans, heads = frontier.forest, prefill.spans, prefill.kv_heads
    device = prefill.keys[layer].device
    head = (forest.tree[nodes] // forest.slots % heads).to(device)
    start, end = forest.start[nodes].to(device), forest.end[nodes].to(device)
    exact = (forest.entries[nodes] > 1).to(device)

    node, step = ragged.rows_and_steps(torch.where(exact, end - start, 1))
    head, exact = head[node], exact[node]
    first = start[node] + step
    # Without suffix and recent window the region reaches to the last token, which is left out.
    covered = spans.length - 1
    last = torch.where(exact, first + 1, end[node]).clamp(max=covered)
    head, first, last = head[first < last], first[first < last], last[first < last]

    # Positions outside the region are never compressed; they are the same in every head.
    origin, stop = region
    fixed = torch.cat(
        [
            torch.arange(0, origin, device=device),
            torch.arange(min(stop, covered), covered, device=device),
        ]
    )
    head = torch.cat([head, torch.arange(heads, device=device).repeat_interleave(len(fixed))])
    first = torch.cat([first, fixed.repeat(heads)])
    last = torch.cat([last, fixed.repeat(heads) + 1])
    order = (head * spans.length + first).argsort()
    counts = torch.bincount(head, minlength=heads).cpu()
    return LayerLayout(
        head=head[order],
        start=first[order],
        end=last[order],
        offsets=ragged.offsets(counts),
        origin=origin,
    )


def _region(frontier: Frontier) -> tuple[int, int]:
    roots = slice(0, frontier.forest.slots)
    return int(frontier.forest.start[roots].min()), int(frontier.forest.end[roots].max())
