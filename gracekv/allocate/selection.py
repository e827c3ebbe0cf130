"""`Selection`: which entries stay; and `LayerLayout`, where they lie in a packed layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.kernels.ragged import offsets, rows, rows_and_steps


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """The entries of one layer, head after head: prefix, kept nodes, recent window, suffix.

    Attributes:
        head: int64 [E], KV head of each entry.
        start: int64 [E], the first absolute position of its interval.
        end: int64 [E], exclusive; end - start > 1 only for merged nodes.
        offsets: int64 [G+1] on the CPU.
        origin: first compressible position, where R^tok starts.
        selected: int64 [E], which of the selection's entries it is; -1 outside the region.
    """

    head: Tensor
    start: Tensor
    end: Tensor
    offsets: Tensor
    origin: int
    selected: Tensor

    def of_selected(self, values: Tensor, otherwise: int) -> Tensor:
        """[E]: what was found for the selection's entries, `otherwise` for all others."""
        if not len(values):
            return values.new_full(self.selected.shape, otherwise)
        picked = values.to(self.selected.device)[self.selected.clamp(min=0)]
        return torch.where(self.selected < 0, otherwise, picked).to(values.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The E entries of the compressible region that stay, head after head, by position.

    An entry is one token, or the merged tokens [start, end) of a node.

    Attributes:
        layers: L.
        heads: G.
        region: first compressible position, and the one after the last.
        offsets: int64 [L*G + 1] on the CPU; head layer * G + g holds entries
            [offsets[h], offsets[h + 1]).
        start: int32 [E] absolute positions.
        end: int32 [E], exclusive; None: every entry is a single token.
        level: int16 [E] level of the entry's node in its tree; None: all are 0.
        from_floor: bool [E], bought by the floor; None: none is.
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
        """The tokens where `kept` (bool [L, G, N]) holds; `origin` is the position of the first."""
        layers, heads, tokens = kept.shape
        # Layer by layer: torch's indices and sums take 8 to 16 bytes a token.
        start = [torch.nonzero(layer)[:, 1].to(torch.int32) + origin for layer in kept]
        counts = torch.cat([layer.sum(dim=1) for layer in kept]).cpu()
        region = (origin, origin + tokens)
        return cls(layers, heads, region, offsets(counts), torch.cat(start))

    @classmethod
    def of_frontier(cls, frontier: Frontier, floor: Frontier | None = None) -> Selection:
        """The kept nodes of `frontier`; those that stay as original tokens are an entry a token.

        `floor` is what the floor had bought.
        """
        forest = frontier.forest
        node = torch.nonzero(frontier.kept).flatten()
        head, start = forest.head_of_node()[node], forest.start[node]
        first, last = int(forest.start.min()), int(forest.end.max())
        order = (head * (last - first) + start).argsort()
        node, head, start = node[order], head[order], start[order]
        row, step = rows_and_steps(forest.entries[node])
        start = start[row] + step
        end = torch.where(forest.entries[node] > 1, 1, forest.length[node])[row] + start
        counts = torch.bincount(head[row], minlength=forest.layers * forest.heads).cpu()
        return cls(
            layers=forest.layers,
            heads=forest.heads,
            region=(first, last),
            offsets=offsets(counts),
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

    def layouts(self, length: int, keys: Sequence[Tensor]) -> Iterator[LayerLayout]:
        """Layouts of all layers, see `layout`; where the `keys` [G, T, d] of each lie."""
        for layer, own in enumerate(keys):
            yield self.layout(layer, length, own.device)

    def layout(self, layer: int, length: int, device: torch.device) -> LayerLayout:
        """The packed entries of a layer: those that stay, and every token outside the region.

        The last prompt token is left out: decoding feeds it again.

        Args:
            layer: 0-based, of the selection's.
            length: T, tokens of the prompt.
            device: of the layer's keys.
        """
        bounds = self.offsets[layer * self.heads : (layer + 1) * self.heads + 1]
        own = slice(int(bounds[0]), int(bounds[-1]))
        head = rows(bounds.diff()).to(device)
        first = self.start[own].to(device).long()
        last = first + 1 if self.end is None else self.end[own].to(device).long()
        # Without suffix and recent window the region reaches to the last token.
        covered = length - 1
        last = last.clamp(max=covered)
        inside = first < last
        selected = torch.arange(own.start, own.stop, device=device)[inside]
        head, first, last = head[inside], first[inside], last[inside]

        # Positions outside the region are never compressed; they are the same in every head.
        origin, stop = self.region
        every = torch.arange(covered, device=device)
        fixed = every[(every < origin) | (every >= stop)]
        head = torch.cat([head, rows(torch.full((self.heads,), len(fixed), device=device))])
        first = torch.cat([first, fixed.repeat(self.heads)])
        last = torch.cat([last, fixed.repeat(self.heads) + 1])
        selected = torch.cat([selected, selected.new_full((self.heads * len(fixed),), -1)])
        order = (head * length + first).argsort()
        counts = torch.bincount(head, minlength=self.heads).cpu()
        return LayerLayout(
            head=head[order],
            start=first[order],
            end=last[order],
            offsets=offsets(counts),
            origin=origin,
            selected=selected[order],
        )

    def where(self, mask: Tensor) -> Selection:
        """The entries where `mask` (bool [E]) holds."""
        inside = offsets(mask.cpu().long())
        mask = mask.to(self.start.device)
        return replace(self, offsets=inside[self.offsets], **self._each(lambda x: x[mask]))

    def cpu(self) -> Selection:
        """The same on the CPU."""
        return replace(self, **self._each(Tensor.cpu))

    def _each(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """What `change` makes of each tensor [E] that there is, by name."""
        names = ("start", "end", "level", "from_floor")
        held = {name: getattr(self, name) for name in names}
        return {name: change(x) for name, x in held.items() if x is not None}
