"""`Run`: what the stages of a pipeline made of one prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Frontier, Selection
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache import (
    Accounting,
    CompressedCache,
    RaggedCache,
    RaggedEntries,
    Timings,
    WidthShare,
)
from gracekv.distributed.sharding import HeadShard
from gracekv.fit import NoFit
from gracekv.fit.base import value_change
from gracekv.pipeline.auction import Auction, AuctionResult
from gracekv.pipeline.record import RunRecord
from gracekv.precision import Precision
from gracekv.prefill import Prefill, Region
from gracekv.prefill.layer_state import bytes_by_kind
from gracekv.segment import Partition
from gracekv.tree import Forest
from gracekv.undo import full_float32
from gracekv.value import Relevance


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What each stage of one pipeline run computed.

    FullKV skips all stages but packing, and selections of single tokens need no trees; what was
    skipped is None.

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

    def recorded(self) -> RunRecord | None:
        """The record; None if nothing was selected (FullKV), or the run is from a file."""
        partition, relevance, selection = self.partition, self.relevance, self.selection
        if partition is None or relevance is None or selection is None:
            return self.record
        chosen = selection, self.floor, self.frontier, self.elastic
        return RunRecord.of(self.cache, partition, relevance, *chosen)

    def entry_scores(self) -> tuple[Tensor, ...] | None:
        """L tensors [E] as `RunRecord.entry_scores` gives them; None without a record."""
        record = self.recorded()
        return None if record is None else record.entry_scores(self.cache)

    def released(self) -> Run:
        """The run with its record in place of what the stages made."""
        facts = self.plan, self.cache, self.accounting, self.timings, self.fingerprint
        return Run(*facts, value_change=self.value_change, record=self.recorded())


def whole_cache(
    prefill: Prefill,
    plan: BudgetPlan,
    precision: Precision,
    stage: Callable[[str], AbstractContextManager[None]],
    *,
    quantise: bool,
) -> CompressedCache:
    """Every token stays: FullKV, or all of them quantised.

    Args:
        prefill: one sequence.
        plan: the budget.
        precision: how entries are stored.
        stage: times the stages.
        quantise: also where the budget has room for all entries as they are.
    """
    covered, dim = prefill.spans.length - 1, prefill.entry_dim
    with stage("pack"):
        cache = RaggedCache(
            tuple(
                RaggedEntries.dense(k[:, :covered, :dim], v[:, :covered, :dim])
                for k, v in zip(prefill.keys, prefill.values, strict=True)
            ),
            length=covered,
        )
    region = prefill.spans.region(plan.recent)
    if not quantise and plan.bytes is not None and plan.holds(prefill.entry_bytes):
        region = Region(region.start, region.start)
    with stage("precision"):
        widths = [precision.widths(layer.positions, region) for layer in cache.layers]
        return precision(cache, widths).with_other_layers(prefill.other_layers)


def finished(
    auction: Auction,
    plan: BudgetPlan,
    partition: Partition,
    pack: Callable[[Selection], RaggedCache],
    fit: Callable[[RaggedCache], RaggedCache],
    seconds: dict[str, float],
) -> Run:
    """What is left to do once tokens have scores: allocate, pack, fit, precision.

    Args:
        auction: has the scores.
        plan: the budget.
        partition: slots.
        pack: the entries of a selection.
        fit: those entries, fitted.
        seconds: of each stage so far.
    """
    pipeline, prefill = auction.pipeline, auction.prefill
    region = prefill.spans.region(plan.recent)
    stage = partial(timed, prefill.keys[0].device, seconds)
    with stage("allocate"):
        bought = auction.spend(plan)
    with stage("pack"):
        packed = pack(bought.selection)
    with stage("precision"):
        widths = bought.packed_widths(prefill, region, pipeline.precision)
        read = pipeline.precision.keys_as_read(packed, widths, prefill.entry_dim)
    with stage("fit"):
        # Values make up for what decoding will read, rounded keys included.
        fitted = fit(read)
        change = None if isinstance(pipeline.fit, NoFit) else value_change(packed, fitted)
    with stage("precision"):
        exact = fitted.with_keys_of(packed, prefill.entry_dim)
        stored = pipeline.precision(exact, widths).with_other_layers(prefill.other_layers)
    return Run(
        plan=bought.plan,
        cache=stored,
        accounting=accounted(prefill, bought.plan, stored, bought, pipeline.costs(prefill)),
        timings=Timings(**prefill.seconds_for(pipeline.needs()), **seconds),
        fingerprint=prefill.fingerprint,
        partition=partition,
        relevance=auction.relevance,
        forest=auction.forest,
        floor=bought.floor,
        frontier=bought.frontier,
        selection=bought.selection,
        elastic=pipeline.elastic,
        value_change=change,
    )


def accounted(
    prefill: Prefill,
    plan: BudgetPlan,
    cache: CompressedCache,
    bought: AuctionResult | None,
    costs: EntryBytes | None,
) -> Accounting:
    """Entries and bytes of `cache`, whose context entries were `bought`; None: all stay.

    Where heads are spread over processes, those of all of them are counted.
    """
    spans, units = prefill.spans, prefill.layers * prefill.kv_heads * prefill.shard.ranks
    sizes = physical_sizes(cache, prefill.shard)
    entries, utility, floor_spent, bound = (
        torch.full((prefill.layers, prefill.kv_heads), spans.context_length), 0.0, 0, None,
    )  # fmt: skip
    if bought is not None:
        entries, utility = bought.selection.per_head() + plan.recent, bought.utility
        if bought.frontier is not None:
            floor_spent, bound = bought.frontier.floor_spent, bought.frontier.bound
    entries = prefill.shard.all_heads(entries, dim=1)
    utility = float(prefill.shard.sum(torch.tensor([utility], dtype=torch.float64)))
    floor_spent = prefill.shard.total(floor_spent)
    covered = spans.length - 1
    fixed = spans.context_start + max(0, covered - spans.context_end)
    spent = None if plan.bytes is None else sizes["bytes"] - units * fixed * prefill.entry_bytes
    return Accounting(
        budget=plan.total,
        spent=int(entries.sum()),
        floor_spent=floor_spent,
        recent=plan.recent,
        entries=entries,
        # All tokens but the last, which decoding feeds again.
        full_bytes=units * covered * (prefill.entry_bytes if costs is None else costs.full),
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


@contextmanager
def timed(device: torch.device, seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Run a stage in full float32 and add its wall seconds to `seconds[stage]`.

    It waits for the GPU, so that a stage pays for its own work.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    with full_float32():
        yield
    if is_cuda:
        torch.cuda.synchronize(device)
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
