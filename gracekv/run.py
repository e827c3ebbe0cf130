"""`Run`: what the stages of a pipeline made of one prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Frontier, Selection
from gracekv.cache import Accounting, RaggedCache, RaggedLayer, Timings
from gracekv.prefill import Needs, Prefill
from gracekv.segment import Partition
from gracekv.timing import StageClock
from gracekv.tree import Forest
from gracekv.value import Relevance

if TYPE_CHECKING:
    from gracekv.report.record import ReportRecord


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
        partition: slots.
        relevance: token scores and head sensitivity.
        forest: all candidate nodes.
        floor: what the floor had bought when the auction began.
        frontier: which nodes stay.
        selection: which entries stay.
        elastic: whether the allocator leaves budget unspent rather than buy what gains nothing.
        value_change: uint8 [E] of all packed entries, layer after layer: by how many hundredths of
            its length the fit moved an entry's value; None if nothing was fitted.
        record: what a report shows, compactly; only where the stages' own results were released.
    """

    plan: BudgetPlan
    cache: RaggedCache
    accounting: Accounting
    timings: Timings
    partition: Partition | None = None
    relevance: Relevance | None = None
    forest: Forest | None = None
    floor: Frontier | None = None
    frontier: Frontier | None = None
    selection: Selection | None = None
    elastic: bool = False
    value_change: Tensor | None = None
    record: ReportRecord | None = None


def full_run(prefill: Prefill, plan: BudgetPlan) -> Run:
    """FullKV: every token as it is."""
    clock = StageClock(prefill.keys[0].device)
    covered = prefill.spans.length - 1
    with clock("pack"):
        cache = RaggedCache(
            tuple(
                RaggedLayer.dense(k[:, :covered], v[:, :covered])
                for k, v in zip(prefill.keys, prefill.values, strict=True)
            ),
            length=covered,
        )
    context = prefill.spans.context_length
    entries = torch.full((prefill.layers, prefill.kv_heads), context)
    accounting = Accounting(
        budget=plan.total,
        spent=int(entries.sum()),
        floor_spent=0,
        recent=plan.recent,
        entries=entries,
        bytes=cache.kv_bytes,
        metadata_bytes=cache.metadata_bytes,
        full_bytes=full_bytes(prefill),
    )
    timings = Timings(**prefill.seconds_for(Needs()), **clock.seconds)
    return Run(plan, cache, accounting, timings)


def full_bytes(prefill: Prefill) -> int:
    """Bytes of keys and values of all tokens but the last, which decoding feeds again."""
    return prefill.layers * prefill.kv_heads * (prefill.spans.length - 1) * prefill.entry_bytes
