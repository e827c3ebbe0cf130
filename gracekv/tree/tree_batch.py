"""`TreeContext`, the inputs of tree building, and `TreeBatch`, the trees of some layers.

They work in a `Workspace`, scratch memory that successive batches reuse: on a CPU, the first write
to a fresh page costs more than the arithmetic on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.prefill import Prefill
from gracekv.prefill.options import free_bytes
from gracekv.segment.base import Partition
from gracekv.tree.base import Nodes
from gracekv.tree.merge import PrototypeRule


class Workspace:
    """One float32 buffer on one device; each batch takes its tensors from it and overwrites it.

    Args:
        device: the device of the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.float32, device=device)
        self._taken = 0

    @cached_property
    def persistent(self) -> Workspace:
        """A second buffer for tensors kept across batches; reused by groups of layers."""
        return Workspace(self._device)

    def reserve(self, numbers: int) -> None:
        """Begin a batch that takes at most `numbers` in total; earlier tensors become invalid."""
        if self._buffer.numel() < numbers:
            # Free the old buffer first, because both may not fit.
            self._buffer = self._buffer[:0].clone()
            self._buffer = torch.empty(numbers, dtype=torch.float32, device=self._device)
        self._taken = 0

    def take(self, *shape: int) -> Tensor:
        """The next contiguous tensor [*shape], float32; its contents are undefined."""
        first = self._taken
        self._taken += math.prod(shape)
        return self._buffer[first : self._taken].view(shape)


_CPU_BYTES = 3 * 2**24
_MAX_GPU_BYTES = 2**31


def scratch_bytes(device: torch.device) -> int:
    """The default limit of working memory: 48 MiB on a CPU, an eighth of free memory on a GPU.

    More does not help a CPU, whose cache is small. On a GPU, a group of layers takes about 45
    levels, most of them of a few nodes and limited by launches; so groups are large, up to 2 GiB.
    Memory that torch's allocator has reserved but not used counts as free. Source: ours.
    """
    if device.type != "cuda":
        return _CPU_BYTES
    return min(_MAX_GPU_BYTES, max(_CPU_BYTES, free_bytes(device) // 8))


@dataclass(frozen=True, slots=True, eq=False)
class TreeContext:
    """The inputs of one forest.

    Attributes:
        prefill: one sequence.
        partition: J slots over the N compressible tokens.
        scores: R^tok [L, G, N] float32.
        seed_scores: S-hat [N] float32.
        sensitivity: omega [L, G] float32.
        rule: how tokens merge.
        forced: floor score [L, G, N] float64 of tokens that must be extracted first, -inf for
            others; None without a floor.
        curvature: kappa [T], or None if no strategy reads it.
    """

    prefill: Prefill
    partition: Partition
    scores: Tensor
    seed_scores: Tensor
    sensitivity: Tensor
    rule: PrototypeRule
    forced: Tensor | None = None
    curvature: Tensor | None = None

    def layer_groups(self, limit: int) -> Iterator[list[int]]:
        """Groups of layers on one device whose gathered tokens take about `limit` bytes.

        Layers with and without RoPE are in separate groups. A group takes every k-th layer of its
        device, so that all groups are similar.
        """
        prefill, length = self.prefill, self.partition.region.length
        # Per token of a head: key, value, about 64 probes' exponentials, and 8 other numbers; on a
        # GPU, also 3 sums for each of about 8 parts of the probes.
        numbers = 2 * prefill.head_dim + (72 if prefill.keys[0].device.type == "cpu" else 96)
        layer_bytes = prefill.kv_heads * length * numbers * 4
        alike: dict[tuple[torch.device, bool], list[int]] = defaultdict(list)
        for layer, keys in enumerate(prefill.keys):
            alike[keys.device, layer in prefill.unrotated].append(layer)
        for layers in alike.values():
            count = math.ceil(len(layers) / max(1, limit // layer_bytes))
            yield from (layers[k::count] for k in range(count))


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The B = U*J trees of some layers on one device: U KV heads with J slots each.

    Tree b of the batch belongs to head b // J and slot b % J; U runs over the G KV heads of each
    layer.

    Attributes:
        context: the inputs of the forest.
        layers: the layers, ascending.
        tree_id: int64 [B], index of each tree in the forest.
        slot_start: int64 [B], absolute first position of each tree's slot.
        slot_row: int64 [B], row of that position in the flat [U*N] tokens of all heads.
        length: int64 [B], tokens of each slot.
        curvature: kappa [T] float64, or None.
        forced: floor score [U, N] float64 (-inf: no candidate), or None.
        scores: R^tok [U, N] float64.
        sensitivity: omega [U] float64.
        region_start: absolute position of the first compressible token.
    """

    context: TreeContext
    layers: tuple[int, ...]
    tree_id: Tensor
    slot_start: Tensor
    slot_row: Tensor
    length: Tensor
    curvature: Tensor | None
    forced: Tensor | None
    scores: Tensor
    sensitivity: Tensor
    region_start: int

    @classmethod
    def of(cls, context: TreeContext, layers: Sequence[int]) -> TreeBatch:
        """All trees of `layers`, on the layers' device."""
        device = context.prefill.keys[layers[0]].device
        partition, chosen = context.partition, list(layers)
        heads = len(chosen) * context.prefill.kv_heads
        # Trees of a forest are numbered (layer * G + head) * J + slot.
        per_layer = context.prefill.kv_heads * partition.slots
        first = torch.tensor(chosen)[:, None] * per_layer
        slots, region = partition.bounds[:-1], partition.region
        columns = [
            (first + torch.arange(per_layer)).flatten(),
            slots.repeat(heads),
            (torch.arange(heads)[:, None] * region.length + slots - region.start).flatten(),
            partition.lengths.repeat(heads),
        ]
        tree_id, slot_start, slot_row, length = torch.stack(columns).to(device)

        def own(x: Tensor) -> Tensor:
            return torch.stack([x[layer] for layer in chosen]).flatten(0, 1).to(device).double()

        return cls(
            context=context,
            layers=tuple(chosen),
            tree_id=tree_id,
            slot_start=slot_start,
            slot_row=slot_row,
            length=length,
            curvature=None if context.curvature is None else context.curvature.to(device).double(),
            forced=None if context.forced is None else own(context.forced),
            scores=own(context.scores),
            sensitivity=own(context.sensitivity),
            region_start=region.start,
        )

    def roots(self) -> Nodes:
        """The B roots."""
        tree = torch.arange(len(self.tree_id), device=self.tree_id.device)
        longest = int(self.context.partition.lengths.max())
        return Nodes(tree, torch.zeros_like(tree), self.length, longest)

    def head(self, tree: Tensor) -> Tensor:
        """int64 [n]: row of the head of each tree [n] in `forced`, `scores` and `sensitivity`."""
        return tree // (len(self.tree_id) // len(self.scores))

    def offset(self, nodes: Nodes) -> Tensor:
        """int64 [V]: index of each node's first token in the region."""
        return self.slot_start[nodes.tree] - self.region_start + nodes.start

    def token_rows(self, nodes: Nodes, width: int) -> Tensor:
        """int64 [V, width]: flat row of each token; padding repeats the last token."""
        step = torch.arange(width, device=nodes.tree.device)
        first = self.slot_row[nodes.tree] + nodes.start
        return first[:, None] + torch.minimum(step, nodes.length[:, None] - 1)

    def known_curvature(self) -> Tensor:
        """kappa [T] float64; raises `ConfigError` if none was computed."""
        if self.curvature is None:
            raise ConfigError(
                "This refiner cuts at curvature peaks, but none was computed. Set candidates=0 and "
                "reward=0, or pass the trees a curvature."
            )
        return self.curvature

    def sums(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """R float64 [V], and which nodes have a floor candidate, bool [V].

        R is the sum of the node's scores in order, Eq. (V6). It is not a difference of running
        sums, so a small node next to a token of large score keeps its precision.

        Args:
            nodes: ordered by tree and start, none overlapping; they may be empty.
        """
        # Alternating nodes and gaps between them: a fixed number of segments.
        bounds = torch.stack([nodes.start, nodes.end], dim=1)
        bounds = bounds.add_(self.slot_row[nodes.tree][:, None]).flatten()
        relevance = _over_segments(self.scores, bounds, "sum")
        if self.forced is None:
            return relevance, torch.zeros_like(relevance, dtype=torch.bool)
        return relevance, _over_segments(self.forced, bounds, "max") > -torch.inf


def _over_segments(values: Tensor, bounds: Tensor, reduce: str) -> Tensor:
    """[V]: flattened `values` [U, N] reduced over [bounds[2i], bounds[2i + 1])."""
    return torch.segment_reduce(values.flatten(), reduce, offsets=bounds, unsafe=True)[::2]
