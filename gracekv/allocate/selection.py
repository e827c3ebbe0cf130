"""`Selection`: the entries that stay, as packers and reports read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.kernels.ragged import offsets, rows, rows_and_steps


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

    def where(self, mask: Tensor) -> Selection:
        """The entries where `mask` (bool [E]) holds."""
        inside = offsets(mask.cpu().long())
        mask = mask.to(self.start.device)
        return replace(
            self,
            offsets=inside[self.offsets],
            start=self.start[mask],
            end=None if self.end is None else self.end[mask],
            level=None if self.level is None else self.level[mask],
            from_floor=None if self.from_floor is None else self.from_floor[mask],
        )

    def cpu(self) -> Selection:
        """The same on the CPU."""
        return replace(
            self,
            start=self.start.cpu(),
            end=None if self.end is None else self.end.cpu(),
            level=None if self.level is None else self.level.cpu(),
            from_floor=None if self.from_floor is None else self.from_floor.cpu(),
        )
