"""`KeptEntries`: which tokens each context entry of a cache stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gracekv.cache import CompressedCache
from gracekv.cache.closing import oldest_position
from gracekv.distributed.sharding import check_whole
from gracekv.errors import ReportError
from gracekv.kernels.ragged import offsets, rows
from gracekv.pipeline import Pipeline
from gracekv.pipeline.run import Run
from gracekv.prefill.prompt import Prompt


class Result(Protocol):
    """The part of `gracekv.CompressionResult` that a report reads."""

    @property
    def model(self) -> Any:
        """The model that the cache belongs to."""

    @property
    def prompt(self) -> Prompt:
        """The compressed prompt."""

    @property
    def run(self) -> Run:
        """The pipeline run."""

    @property
    def pipeline(self) -> Pipeline:
        """The stages' strategies."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptEntries:
    """The entries of the context, ordered by head and position; tensors on the CPU.

    Prefix and suffix are left out, since every head holds all of their tokens.

    Attributes:
        layers: L.
        heads: G.
        region: absolute (start, end) of the context, as far as the cache covers it. The cache
            covers all prompt tokens but the last, which decoding feeds again.
        offsets: int64 [L*G+1]; head layer * G + g holds entries [offsets[h], offsets[h+1]).
        start: int64 [E] first absolute position that the entry stands for.
        end: int64 [E] end of those positions, exclusive.
        multiplicity: float32 [E], the entry's weight in attention, in tokens; at most end - start
            unless fitted.
        depth: int16 [E] level of its node in the slot's tree, -1 outside of trees (recent window,
            FullKV); None without trees.
        floor: bool [E], whether the floor bought it, not the auction; None without a floor.
        value_change: float32 [E], how much the fit changed the value, relative to the value's norm,
            in steps of 0.01 up to 2.55; None if nothing was fitted or the result is from a file.
        bits: int64 [E], bits per number of the entry's key and value; None if all are in the
            model's dtype.
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
    bits: Tensor | None = None

    @property
    def length(self) -> Tensor:
        """int64 [E], number of tokens that each entry stands for."""
        return self.end - self.start

    def head_of_entry(self) -> Tensor:
        """int64 [E]: layer * G + head."""
        return rows(self.offsets.diff())

    def entry_of_token(self, position: int) -> Tensor:
        """int64 [L*G]: the entry of each head that stands for the token, -1 if it is dropped."""
        holder = torch.full((len(self.offsets) - 1,), -1, device="cpu")
        at = ((self.start <= position) & (position < self.end)).nonzero()[:, 0]
        holder[self.head_of_entry()[at]] = at
        return holder


def check_result(result: object) -> None:
    """Raise `ReportError` unless `result` is a result of `gracekv.compress` for one prompt."""
    if not all(hasattr(result, name) for name in ("run", "prompt", "pipeline")):
        raise ReportError(
            f"A report takes a result of gracekv.compress for one prompt; got "
            f"{type(result).__name__}. For a batch use batch.report(path)."
        )


def result_entries(result: Result) -> KeptEntries:
    """The context entries of `result`, and the tokens that each stands for.

    Raises `ReportError` if `result` was loaded from a file or extended and holds merged entries, if
    gaps between its positions were closed, or if the packer did not pack the selected entries in
    order.
    """
    check_whole(result.model, "report")
    run, spans, represents = result.run, result.prompt.spans, result.pipeline.pack.represents
    cache, record = run.cache, run.recorded()
    # A prefix always stays, so its entries begin at 0 until they are moved.
    if spans.context_start and oldest_position(cache):
        raise ReportError(
            "Gaps between positions were closed, so entries no longer say which tokens they are. "
            'Write the report before that, or use a Limit with positions="counted".'
        )
    region = (spans.context_start, min(spans.context_end, cache.length))
    position, multiplicity, head, change, bits = _context_entries(cache, region, run.value_change)
    layers, heads = len(cache.layers), cache.layers[0].heads
    starts = offsets(torch.bincount(head, minlength=layers * heads))
    columns = (position, position + 1, multiplicity)
    entries = KeptEntries(layers, heads, region, starts, *columns, value_change=change, bits=bits)
    if record is None:
        # A packer of nodes merges tokens, and a file does not record which, unless all are kept.
        full = run.accounting.entries.numel() * spans.context_length
        if represents == "node" and run.accounting.spent < full:
            raise ReportError(
                "This result was loaded from a file or extended, and holds merged entries but not "
                "the tokens that each stands for. Write the report from the result of compress."
            )
        return entries

    in_region = position < record.region[1]
    depth = torch.where(in_region, 0, -1).to(torch.int16)
    floor = torch.zeros_like(in_region)
    if (selection := record.selection) is None:
        return replace(entries, depth=depth, floor=floor)
    start = selection.start.long()
    end = start + 1 if selection.end is None else selection.end.long()
    packed, places = start < cache.length, position[in_region]
    start, end = start[packed], end[packed].clamp(max=cache.length)
    if len(places) != len(start) or bool(((places < start) | (places >= end)).any()):
        raise ReportError(
            f"The packer did not keep the selected entries in order, so there is nothing to "
            f"report: the cache holds {len(places)} entries of the trees, the selection "
            f"{len(start)}. Packers must follow gracekv.cache.Packer."
        )
    if represents == "node":
        entries.start[in_region], entries.end[in_region] = start, end
    if selection.level is not None:
        depth[in_region] = selection.level[packed]
    if selection.from_floor is not None:
        floor[in_region] = selection.from_floor[packed]
    return replace(entries, depth=depth, floor=floor)


def _context_entries(
    cache: CompressedCache, region: tuple[int, int], change: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Position, multiplicity, layer * G + head, value change and bits of entries in `region`."""
    parts = []
    for number, layer in enumerate(cache.layers):
        row, *columns = layer.index()
        parts.append((row + number * layer.heads, *columns))
    head, position, log_multiplicity = (torch.cat(part) for part in zip(*parts, strict=True))
    inside = (position >= region[0]) & (position < region[1])
    if change is not None:
        change = change[inside].float() / 100
    coded = any(layer.coded for layer in cache.layers)
    bits = torch.cat([layer.bits() for layer in cache.layers])[inside] if coded else None
    return position[inside], log_multiplicity[inside].float().exp(), head[inside], change, bits
