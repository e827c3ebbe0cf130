"""`Run`: the results of all stages for one sequence, and `RunRecord`: a compact record of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Frontier, Selection
from gracekv.allocate.curve import AuctionCurve, auction_curve
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.top_tokens import entry_gains
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.distributed.sharding import HeadShard
from gracekv.pipeline.comparison import AuctionResult
from gracekv.prefill import CaptureInfo
from gracekv.prefill.layer_state import bytes_by_kind
from gracekv.segment import Partition
from gracekv.tree import Forest
from gracekv.value import Relevance

# Values below this share of the largest become 0. Source: ours.
_SMALLEST_SHARE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class CodedRelevance:
    """Relevance in multiples of the head's mean, on a logarithmic scale; tensors on the CPU.

    Attributes:
        codes: uint8 [L, G, N]; 0 stands for 0 and for values below 1e-7 of the largest.
        low: logarithm of the value of code 1.
        high: logarithm of the value of code 255.
        mean: float32 [L, G], each head's mean.
    """

    codes: Tensor
    low: float
    high: float
    mean: Tensor

    @classmethod
    def of(cls, relevance: Tensor) -> CodedRelevance:
        """Encode non-negative relevance [L, G, N]. Synchronises with a GPU twice.

        Logarithms are off by at most (high - low) / 508, so values by about 3 %.
        """
        scaled = relevance.to(torch.float64, copy=True)
        mean = scaled.mean(-1)
        scaled *= mean.reciprocal().nan_to_num_(posinf=0.0)[..., None]
        low, high, codes = 0.0, 0.0, torch.zeros_like(relevance, dtype=torch.uint8)
        if relevance.numel():
            largest = scaled.amax()
            large = scaled >= (largest * _SMALLEST_SHARE).clamp_min(1e-300)
            smallest = torch.where(large, scaled, torch.inf).amin()
            numbers = torch.cat([mean.flatten(), torch.stack([smallest, largest]).log_()]).cpu()
            mean = numbers[:-2].view(mean.shape)
            if math.isfinite(numbers[-1]):
                low, high = numbers[-2:].tolist()
                steps = scaled.log_().sub_(low).div_((high - low) / 254 or 1.0).round_().add_(1)
                codes = torch.where(large, steps, 0).to(torch.uint8)
        return cls(codes.cpu(), low, high, mean.float().cpu())

    def decoded(self, at: Any = ...) -> Tensor:
        """float32 [L, G, N], indexed by `at`, in multiples of the head's mean."""
        codes, step = self.codes[at], (self.high - self.low) / 254
        return torch.where(codes > 0, (self.low + step * (codes.float() - 1)).exp(), 0.0)

    def at(self, token: int) -> Tensor:
        """float32 [L, G]: the relevance of one token, counted from the context's start."""
        return self.decoded((..., token)) * self.mean


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """A compact record of one run's scores and selection; tensors on the CPU.

    A limit's first cut ranks the packed entries by these scores, and `gracekv.report` shows them.

    Attributes:
        region: first compressible position and one past the last.
        selection: the entries that stay; None for single tokens without trees, whose positions are
            in the cache.
        slots: int32 [J + 1] absolute slot borders; None if every token is a slot.
        relevance: relevance of the compressible tokens.
        curve: utility against entries spent.
        merges: whether an entry stands for all tokens of its node, not only for one.
    """

    region: tuple[int, int]
    selection: Selection | None
    slots: Tensor | None
    relevance: CodedRelevance
    curve: AuctionCurve
    merges: bool = True

    def entry_scores(self, cache: CompressedCache) -> tuple[Tensor, ...]:
        """Relevance of each entry of the run's `cache`: L tensors, float32 [E].

        A merged node has the sum over its tokens, Eq. (V6); entries outside `region` have inf.
        """
        first, last = self.region
        scores, sums = self.relevance.decoded() * self.relevance.mean[..., None], None
        if (selection := self.selection) is not None and self.merges:
            # Decoding feeds the last prompt token again: an entry that starts there is not packed.
            selection = selection.where(selection.start < cache.length)
            every = entry_gains(scores, torch.ones_like(self.relevance.mean), selection).float()
            sums = every.split(selection.per_head().sum(1).tolist())
        by_layer = []
        for number, layer in enumerate(cache.layers):
            row, position, _ = layer.index()
            inside = (position >= first) & (position < last)
            by_layer.append(torch.full_like(row, torch.inf, dtype=torch.float32))
            token_scores = scores[number][row[inside], position[inside] - first]
            by_layer[-1][inside] = token_scores if sums is None else sums[number]
        return tuple(by_layer)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The results of all stages of one pipeline run.

    Results of skipped stages are None: FullKV only packs, and selections of single tokens need no
    trees. So are floor and frontier if bits are allocated, since not all of their nodes stay.

    Attributes:
        plan: the budget in entries.
        cache: the physical entries.
        accounting: entries and bytes.
        timings: seconds per stage.
        fingerprint: identifies the model and the tokenizer at the time of the prefill.
        partition: slots.
        relevance: token scores and head sensitivity.
        forest: all candidate nodes.
        floor: the nodes that the floor bought before the auction.
        frontier: which nodes stay.
        selection: which entries stay.
        value_change: uint8 [E] over all packed entries, layer after layer: how far the fit moved
            each entry's value, in percent of its norm; None if nothing was fitted.
        record: a compact record of the stages' results if these were released, else None.
        scores: L tensors float32 [E] after an extension; inf for parts without a record, such as
            messages that keep all entries.
        past: L tensors float32 [G, P], the scores that a passage's queries give the entries before
            it; None if there are none or the scorer does not score them.
        merges: as in `RunRecord`.
    """

    plan: BudgetPlan
    cache: CompressedCache
    accounting: Accounting
    timings: Timings
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    partition: Partition | None = None
    relevance: Relevance | None = None
    forest: Forest | None = None
    floor: Frontier | None = None
    frontier: Frontier | None = None
    selection: Selection | None = None
    value_change: Tensor | None = None
    record: RunRecord | None = None
    scores: tuple[Tensor, ...] | None = None
    past: tuple[Tensor, ...] | None = None
    merges: bool = True

    def recorded(self) -> RunRecord | None:
        """The record; None if nothing was selected (FullKV), or the run is from a file."""
        partition, relevance, selection = self.partition, self.relevance, self.selection
        if partition is None or relevance is None or selection is None:
            return self.record
        whole = partition.slots == partition.region.length
        prices = relevance.scores, relevance.sensitivity
        return RunRecord(
            region=selection.region,
            selection=None if selection.end is None else selection.cpu(),
            slots=None if whole else partition.bounds.to("cpu", torch.int32),
            relevance=CodedRelevance.of(relevance.scores),
            curve=auction_curve(selection, *prices, self.floor, self.frontier),
            merges=self.merges,
        )

    def entry_scores(self) -> tuple[Tensor, ...] | None:
        """L tensors [E] as from `RunRecord.entry_scores`; None without a record."""
        record = self.recorded()
        return self.scores if record is None else record.entry_scores(self.cache)

    def released(self) -> Run:
        """The run with its record in place of the stages' results."""
        facts = self.plan, self.cache, self.accounting, self.timings, self.fingerprint
        return Run(*facts, value_change=self.value_change, record=self.recorded())


def account(
    info: CaptureInfo,
    plan: BudgetPlan,
    cache: CompressedCache,
    result: AuctionResult | None,
    costs: EntryBytes | None,
) -> Accounting:
    """Entries and bytes of `cache`; `result` is None if all context entries stay.

    If heads are sharded over processes, counts cover all of them.
    """
    spans, units = info.spans, info.layers * info.kv_heads * info.shard.ranks
    sizes = physical_sizes(cache, info.shard)
    entries = torch.full((info.layers, info.kv_heads), spans.context_length)
    utility, floor_spent, bound = 0.0, 0, None
    if result is not None:
        entries, utility = result.selection.per_head() + plan.recent, result.utility
        if result.frontier is not None:
            floor_spent, bound = result.frontier.floor_spent, result.frontier.bound
        elif (protected := result.selection.from_floor) is not None:
            floor_spent = int(protected.sum())
    entries = info.shard.all_heads(entries, dim=1)
    utility = float(info.shard.sum(torch.tensor([utility], dtype=torch.float64)))
    floor_spent = info.shard.total(floor_spent)
    covered = spans.length - 1
    fixed = spans.context_start - spans.past + max(0, covered - spans.context_end)
    spent = None if plan.bytes is None else sizes["bytes"] - units * fixed * info.entry_bytes
    full = info.entry_bytes
    # Codes are compared with 16-bit numbers.
    if costs is not None or any(x.bits < 16 for x in sizes["widths"]):
        full = 4 * info.entry_dim
    return Accounting(
        budget=plan.total,
        spent=int(entries.sum()),
        floor_spent=floor_spent,
        recent=plan.recent,
        entries=entries,
        # All tokens but the last, which decoding feeds again.
        full_bytes=units * covered * full,
        utility=utility,
        bound=bound,
        budget_bytes=plan.bytes,
        spent_bytes=spent,
        **sizes,
    )


def physical_sizes(cache: CompressedCache, shard: HeadShard) -> dict[str, Any]:
    """Fields of `Accounting` that measure the tensors of `cache`, over all heads."""
    others = bytes_by_kind(cache.other_layers)
    for kind in {layer.kind for layer in cache.other_layers if layer.window is not None}:
        # Every process holds all states of linear layers.
        others[kind] *= shard.ranks
    return {
        "bytes": shard.total(cache.kv_bytes),
        "metadata_bytes": shard.total(cache.metadata_bytes),
        "widths": WidthShare.of(cache, shard),
        "other_bytes": others,
    }
