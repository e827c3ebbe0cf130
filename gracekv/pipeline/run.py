"""`Run`: the results of all stages of a pipeline, for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Frontier, Selection
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.distributed.sharding import HeadShard
from gracekv.pipeline.auction import AuctionResult
from gracekv.pipeline.record import RunRecord
from gracekv.prefill import CaptureInfo
from gracekv.prefill.layer_state import bytes_by_kind
from gracekv.segment import Partition
from gracekv.tree import Forest
from gracekv.value import Relevance


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The results of all stages of one pipeline run.

    Results of skipped stages are None: FullKV only packs, and selections of single tokens need no
    trees.

    Attributes:
        plan: the budget in entries.
        cache: the physical entries.
        accounting: entries and bytes.
        timings: seconds per stage.
        fingerprint: identifies model and tokenizer, as they were at the prefill.
        partition: slots.
        relevance: token scores and head sensitivity.
        forest: all candidate nodes.
        floor: what the floor had bought when the auction began.
        frontier: which nodes stay.
        selection: which entries stay.
        elastic: whether the allocator leaves budget unspent rather than buy what gains nothing.
        value_change: uint8 [E] of all packed entries, layer after layer: by how many hundredths of
            its length the fit moved an entry's value; None if nothing was fitted.
        record: what stays of the stages' results where they are released; else None.
        scores: L tensors float32 [E] after an extension; inf where a part has no record, as
            messages that keep all entries.
    """

    plan: BudgetPlan
    cache: CompressedCache
    accounting: Accounting
    timings: Timings
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    partition: Partition | None = None
    relevance: Relevance | None = None
    forest: Forest | None = None
    floor: Frontier | None = None
    frontier: Frontier | None = None
    selection: Selection | None = None
    elastic: bool = False
    value_change: Tensor | None = None
    record: RunRecord | None = None
    scores: tuple[Tensor, ...] | None = None

    def recorded(self) -> RunRecord | None:
        """The record; None if nothing was selected (FullKV), or the run is from a file."""
        partition, relevance, selection = self.partition, self.relevance, self.selection
        if partition is None or relevance is None or selection is None:
            return self.record
        chosen = selection, self.floor, self.frontier, self.elastic
        return RunRecord.of(partition, relevance, *chosen)

    def entry_scores(self) -> tuple[Tensor, ...] | None:
        """L tensors [E] as `RunRecord.entry_scores` gives them; None without a record."""
        record = self.recorded()
        return self.scores if record is None else record.entry_scores(self.cache)

    def released(self) -> Run:
        """The run with its record in place of what the stages made."""
        facts = self.plan, self.cache, self.accounting, self.timings, self.fingerprint
        return Run(*facts, value_change=self.value_change, record=self.recorded())


def accounted(
    info: CaptureInfo,
    plan: BudgetPlan,
    cache: CompressedCache,
    bought: AuctionResult | None,
    costs: EntryBytes | None,
) -> Accounting:
    """Entries and bytes of `cache`, whose context entries were `bought`, or are all there if None.

    Where heads are spread over processes, those of all of them are counted.
    """
    spans, units = info.spans, info.layers * info.kv_heads * info.shard.ranks
    sizes = physical_sizes(cache, info.shard)
    entries = torch.full((info.layers, info.kv_heads), spans.context_length)
    utility, floor_spent, bound = 0.0, 0, None
    if bought is not None:
        entries, utility = bought.selection.per_head() + plan.recent, bought.utility
        if bought.frontier is not None:
            floor_spent, bound = bought.frontier.floor_spent, bought.frontier.bound
    entries = info.shard.all_heads(entries, dim=1)
    utility = float(info.shard.sum(torch.tensor([utility], dtype=torch.float64)))
    floor_spent = info.shard.total(floor_spent)
    covered = spans.length - 1
    fixed = spans.context_start + max(0, covered - spans.context_end)
    spent = None if plan.bytes is None else sizes["bytes"] - units * fixed * info.entry_bytes
    return Accounting(
        budget=plan.total,
        spent=int(entries.sum()),
        floor_spent=floor_spent,
        recent=plan.recent,
        entries=entries,
        # All tokens but the last, which decoding feeds again.
        full_bytes=units * covered * (info.entry_bytes if costs is None else costs.full),
        utility=utility,
        bound=bound,
        budget_bytes=plan.bytes,
        spent_bytes=spent,
        **sizes,
    )


def physical_sizes(cache: CompressedCache, shard: HeadShard) -> dict[str, Any]:
    """What `Accounting` says of the tensors of `cache`, by its names; all heads."""
    others = bytes_by_kind(cache.other_layers)
    for kind in {layer.kind for layer in cache.other_layers if layer.window is not None}:
        # Of the states of linear layers every process holds all.
        others[kind] *= shard.ranks
    return {
        "bytes": shard.total(cache.kv_bytes),
        "metadata_bytes": shard.total(cache.metadata_bytes),
        "widths": WidthShare.of(cache, shard),
        "other_bytes": others,
    }
