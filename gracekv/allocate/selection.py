"""`Selection`, the entries that stay, and `LayerLayout`, their order in a packed layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.kernels.ragged import offsets, rows, rows_and_steps
from gracekv.kernels.uploads import upload


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """The entries of one layer, head after head: prefix, kept nodes, recent window, suffix.

    Attributes:
        head: int64 [E], KV head of each entry.
        start: int64 [E], the first absolute position of its interval.
        end: int64 [E], exclusive; end - start > 1 only for merged nodes.
        selected: int64 [E], index in the selection; -1 outside the region.
        merged: int64 [M], ascending indices of the entries with several tokens.
        merged_tokens: how many tokens these have in total.
        offsets: int64 [G+1] on the CPU.
        origin: first compressible position, where R^tok starts.
    """

    head: Tensor
    start: Tensor
    end: Tensor
    selected: Tensor
    merged: Tensor
    merged_tokens: int
    offsets: Tensor
    origin: int


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The E entries of the compressible region that stay, head after head, by position.

    An entry is one token, or the merged tokens [start, end) of a node.

    Attributes:
        layers: L.
        heads: G.
        region: first compressible position and one past the last.
        offsets: int64 [L*G + 1] on the CPU; head layer * G + g holds entries
            [offsets[h], offsets[h + 1]).
        start: int32 [E] absolute positions.
        end: int32 [E], exclusive; or None if every entry is a single token.
        level: int16 [E] level of the entry's node in its tree; or None if all are 0.
        from_floor: bool [E], entries that the floor bought; or None if it bought none.
    """

    layers: int
    heads: int
    region: tuple[int, int]
    offsets: Tensor
    start: Tensor
    end: Tensor | None = None
    level: Tensor | None = None
    from_floor: Tensor | None = None

    @classmethod
    def of_tokens(cls, kept: Tensor, origin: int) -> Selection:
        """The tokens where bool `kept` [L, G, N] is True; `origin` is the position of the first."""
        layers, heads, tokens = kept.shape
        # Layer by layer, since torch's indices and sums take 8 to 16 bytes per token.
        start = [torch.nonzero(layer)[:, 1].to(torch.int32) + origin for layer in kept]
        counts = torch.cat([layer.sum(dim=1) for layer in kept]).cpu()
        return cls(layers, heads, (origin, origin + tokens), offsets(counts), torch.cat(start))

    @classmethod
    def of_frontier(cls, frontier: Frontier, floor: Frontier | None = None) -> Selection:
        """The kept nodes of `frontier`; nodes kept as original tokens have one entry per token.

        `floor` is the frontier that the floor bought.
        """
        forest = frontier.forest
        node = torch.nonzero(frontier.kept).flatten()
        first, last = forest.region
        node = node[(forest.head_of_node() * (last - first) + forest.start)[node].argsort()]
        row, step = rows_and_steps(forest.entries[node])
        start = forest.start[node][row] + step
        end = torch.where(forest.entries[node] > 1, 1, forest.length[node])[row] + start
        return cls(
            layers=forest.layers,
            heads=forest.heads,
            region=(first, last),
            offsets=offsets(frontier.entries_per_head().flatten().cpu()),
            start=start.to(torch.int32),
            end=end.to(torch.int32),
            level=forest.level[node][row].to(torch.int16),
            from_floor=None if floor is None else floor.reached[node][row],
        )

    @property
    def entries(self) -> int:
        """E."""
        return len(self.start)

    def head_of_entry(self) -> Tensor:
        """int64 [E]: layer * G + head of each entry, on the CPU."""
        return rows(self.offsets.diff())

    def per_head(self) -> Tensor:
        """int64 [L, G] entries, on the CPU."""
        return self.offsets.diff().view(self.layers, self.heads)

    def layouts(self, length: int, keys: Sequence[Tensor], past: int = 0) -> Iterator[LayerLayout]:
        """The packed entries of each layer: the selected ones, and every token outside the region.

        Without the places of entries before a passage, and without the last prompt token, which
        decoding feeds again. Synchronises with a GPU a fixed number of times for all layers.

        Args:
            length: T, tokens of the prompt.
            keys: [G, T, d] of each layer; each layout is on their device.
            past: P, number of places before the first token.
        """
        (origin, stop), covered, device = self.region, length - 1, self.start.device
        counts = self.offsets.diff()
        if stop > covered and self.entries:
            # Without suffix and recent window, the region extends to the last token.
            final = self.start[(self.offsets[1:] - 1).clamp(min=0).to(device)].cpu()
            counts -= ((final == covered) & (counts > 0)).long()
        # The source of each packed entry: the selection, followed by all positions outside the
        # region, which are the same in every head.
        every = torch.arange(max(stop, covered), device=device)
        fixed = torch.cat([every[past:origin], every[stop:]])
        size = counts + len(fixed)
        head, step = rows_and_steps(size)
        place, inner = step - (origin - past), counts[head]
        outside = torch.where(place < 0, step, step - inner) + self.entries
        source = torch.where((place < 0) | (place >= inner), outside, self.offsets[head] + place)
        unit, source = torch.stack([head, source]).to(device)
        start = torch.cat([self.start.long(), fixed])[source]
        end = start + 1
        if self.end is not None:
            end = torch.cat([self.end.long().clamp(max=covered), fixed + 1])[source]
        selected = torch.where(source < self.entries, source, -1)
        coarse, counted = self._merged(unit, end - start)
        bounds, head = offsets(size), unit % self.heads
        for layer, like in enumerate(keys):
            edges = bounds[layer * self.heads : (layer + 1) * self.heads + 1]
            part = slice(int(edges[0]), int(edges[-1]))
            count, tokens = counted[layer]
            coarse_rows, coarse = coarse[:count], coarse[count:]
            columns = head[part], start[part], end[part], selected[part], coarse_rows - part.start
            heads, begins, ends, index, merged = (x.to(like.device) for x in columns)
            yield LayerLayout(heads, begins, ends, index, merged, tokens, edges - edges[0], origin)

    def _merged(self, unit: Tensor, length: Tensor) -> tuple[Tensor, list[list[int]]]:
        """The packed entries with several tokens, int64 [M], and their number and tokens per layer.

        `unit` int64 [E] is layer * G + head of each packed entry, `length` int64 [E] its number of
        tokens.
        """
        if self.end is None:
            return unit[:0], [[0, 0]] * self.layers
        merged = torch.nonzero(length > 1).flatten()
        counts = unit.new_zeros(self.layers, 2)
        own = torch.stack([torch.ones_like(merged), length[merged]], dim=1)
        return merged, counts.index_add_(0, unit[merged] // self.heads, own).tolist()

    def where(self, mask: Tensor) -> Selection:
        """The entries where `mask` (bool [E]) is True."""
        mask, device = mask.cpu(), self.start.device
        inside, at = offsets(mask.long()), upload(mask.nonzero()[:, 0], device)
        return replace(self, offsets=inside[self.offsets], **self._each(lambda x: x[at]))

    def cpu(self) -> Selection:
        """This selection on the CPU."""
        return replace(self, **self._each(Tensor.cpu))

    def _each(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """`change` applied to each tensor [E] that is not None, by name."""
        held = {name: getattr(self, name) for name in ("start", "end", "level", "from_floor")}
        return {name: change(x) for name, x in held.items() if x is not None}
