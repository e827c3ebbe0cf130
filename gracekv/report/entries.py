"""`KeptEntries`: which tokens each context entry of a cache stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gracekv.cache import Accounting, CompressedCache
from gracekv.errors import ReportError
from gracekv.kernels.ragged import offsets, rows

if TYPE_CHECKING:
    from gracekv.pipeline import Pipeline
    from gracekv.pipeline.run import Run
    from gracekv.prefill.prompt import Prompt


class Result(Protocol):
    """What a report reads of a `gracekv.CompressionResult`."""

    @property
    def model(self) -> Any:
        """The model of the cache."""

    @property
    def prompt(self) -> Prompt:
        """What was compressed."""

    @property
    def _run(self) -> Run:
        """What each stage computed."""

    @property
    def pipeline(self) -> Pipeline:
        """The stages' strategies."""

    @property
    def accounting(self) -> Accounting:
        """Entries and bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptEntries:
    """The context's entries, head after head, by position; tensors on the CPU.

    Prefix and suffix are not listed: every head holds them token by token.

    Attributes:
        layers: L.
        heads: G.
        region: (start, end) of the context as far as the cache covers it, absolute. It covers all
            prompt tokens but the last, which decoding feeds again.
        offsets: int64 [L*G+1]; head layer * G + g holds entries [offsets[h], offsets[h+1]).
        start: int64 [E] first absolute position that the entry stands for.
        end: int64 [E] exclusive.
        multiplicity: float32 [E], how many tokens the entry weighs as in attention; at most
            end - start unless fitted.
        depth: int16 [E] level of its node in the slot's tree, -1 outside of trees (recent window,
            FullKV); None without trees.
        floor: bool [E], bought by the floor, not by the auction; None without a floor.
        value_change: float32 [E], how far the fit moved the entry's value, relative to its length,
            in steps of 0.01 up to 2.55; None if nothing was fitted, or loaded from a file.
    """

    layers: int
    heads: int
    region: tuple[int, int]
    offsets: Tensor
    start: Tensor
    end: Tensor
    multiplicity: Tensor
    depth: Tensor | None = None
    floor: Tensor | None = None
    value_change: Tensor | None = None

    @property
    def length(self) -> Tensor:
        """int64 [E], tokens that each entry stands for."""
        return self.end - self.start

    def head_of_entry(self) -> Tensor:
        """int64 [E]: layer * G + head."""
        return rows(self.offsets.diff())

    def entry_of_token(self, position: int) -> Tensor:
        """int64 [L*G]: the entry of each head that stands for the token, -1 where it is gone."""
        stride = int(self.end.max()) + 1 if len(self.end) else 1
        stride = max(stride, position + 1)
        heads = torch.arange(len(self.offsets) - 1)
        # Entries are sorted by (head, start), so the last one that begins here or before is it.
        key = self.head_of_entry() * stride + self.start
        at = torch.searchsorted(key, heads * stride + position, right=True) - 1
        inside = (at >= self.offsets[:-1]) & (at < self.offsets[1:])
        held = inside.clone()
        held[inside] = self.end[at[inside]] > position
        return torch.where(held, at, -1)

    def entry_lengths(self) -> Tensor:
        """int64 [L*G, W] of the region: each token's entry's length, 0 where the token is gone."""
        first, last = self.region
        steps = torch.zeros(len(self.offsets) - 1, last - first + 1, dtype=torch.int64)
        head, length = self.head_of_entry(), self.length
        flat = steps.view(-1)
        row = head * steps.shape[1] - first
        flat.index_add_(0, row + self.start, length)
        flat.index_add_(0, row + self.end, -length)
        return steps.cumsum(1)[:, :-1]


def kept_entries(result: Result) -> KeptEntries:
    """What the packed entries of one prompt's `result` stand for.

    Raises `ReportError` if entries are merged and `result` does not say of what (it was loaded), or
    if the packer did not pack the selected entries in order.
    """
    run, spans, represents = result._run, result.prompt.spans, result.pipeline.pack.represents
    cache, record = run.cache, run.recorded()
    region = (spans.context_start, min(spans.context_end, cache.length))
    position, multiplicity, head, change = _context_entries(cache, region, run.value_change)
    layers, heads = len(cache.layers), cache.layers[0].heads
    starts = offsets(torch.bincount(head, minlength=layers * heads))
    entries = KeptEntries(layers, heads, region, starts, position, position + 1, multiplicity)
    entries = replace(entries, value_change=change)
    if record is None:
        # Without trees nothing was merged, unless what was merged is not known any more.
        if represents == "node" and run.accounting.spent < run.accounting.entries.numel() * (
            spans.context_length
        ):
            raise ReportError(
                "This result was loaded from a file, which holds merged entries but not the "
                "tokens that each stands for. Write the report from the result of compress, "
                "beside result.save."
            )
        return entries

    in_region = position < record.region[1]
    depth = torch.where(in_region, 0, -1).to(torch.int16)
    floor = torch.zeros_like(in_region)
    chosen = record.selection
    if chosen is None:
        return replace(entries, depth=depth, floor=floor)
    start = chosen.start.long()
    end = start + 1 if chosen.end is None else chosen.end.long()
    packed, here = start < cache.length, position[in_region]
    start, end = start[packed], end[packed].clamp(max=cache.length)
    if len(here) != len(start) or bool(((here < start) | (here >= end)).any()):
        raise ReportError(
            f"The cache holds {len(here)} entries of the trees, the selection {len(start)}, or "
            f"they lie elsewhere: the packer did not keep the selected entries in order, so there "
            f"is nothing to report. Packers must follow gracekv.cache.Packer."
        )
    starts, ends = position.clone(), position + 1
    if represents == "node":
        starts[in_region], ends[in_region] = start, end
    if chosen.level is not None:
        depth[in_region] = chosen.level[packed]
    if chosen.from_floor is not None:
        floor[in_region] = chosen.from_floor[packed]
    return replace(entries, start=starts, end=ends, depth=depth, floor=floor)


def _context_entries(
    cache: CompressedCache, region: tuple[int, int], change: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of all entries in `region`: position, multiplicity, layer * G + head, change of the value."""
    parts, kept = [], []
    for number, layer in enumerate(cache.layers):
        row, position, log_multiplicity = layer.index()
        inside = (position >= region[0]) & (position < region[1])
        weight = log_multiplicity.float().exp()
        parts.append((position[inside], weight[inside], row[inside] + number * layer.heads))
        kept.append(inside)
    position, multiplicity, head = (torch.cat(part) for part in zip(*parts, strict=True))
    if change is not None:
        change = change[torch.cat(kept)].float() / 100
    return position, multiplicity, head, change
