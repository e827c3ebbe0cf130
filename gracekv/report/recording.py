"""From a run to its `ReportRecord`."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.allocate import Selection
from gracekv.cache import CompressedCache
from gracekv.pipeline.run import Run
from gracekv.report.auction import auction_curve
from gracekv.report.record import CodedRelevance, ReportRecord


def record_of(run: Run) -> ReportRecord | None:
    """The record of `run`; None if it selected nothing (FullKV, or loaded from a file)."""
    if isinstance(run.record, ReportRecord):
        return run.record
    chosen, partition, relevance = run.selection, run.partition, run.relevance
    if chosen is None or partition is None or relevance is None:
        return None
    in_cache = chosen.end is None and _lists(run.cache, chosen)
    whole = partition.slots == partition.region.length
    return ReportRecord(
        region=chosen.region,
        selection=None if in_cache else chosen.cpu(),
        slots=None if whole else partition.bounds.to("cpu", torch.int32),
        relevance=CodedRelevance.of(relevance.scores),
        curve=auction_curve(chosen, relevance, run.frontier, run.floor, run.elastic),
        value_change=run.value_change,
    )


def released(run: Run) -> Run:
    """`run` without what its stages made, but with what a report shows of it."""
    facts = run.plan, run.cache, run.accounting, run.timings, run.fingerprint
    return Run(*facts, record=record_of(run))


def entry_scores(run: Run) -> tuple[Tensor, ...] | None:
    """L tensors float32 [E]: the relevance of the token of each packed entry, as a record has it.

    inf for entries outside what was compressed; None if there is no record.
    """
    record = record_of(run)
    if record is None:
        return None
    first, last = record.region
    scores = record.relevance.decoded() * record.relevance.mean[..., None]
    found = []
    for own, layer in zip(scores, run.cache.layers, strict=True):
        row, position, _ = layer.index()
        inside = (position >= first) & (position < last)
        found.append(torch.full(row.shape, torch.inf))
        found[-1][inside] = own[row[inside], position[inside] - first]
    return tuple(found)


def _lists(cache: CompressedCache, selection: Selection) -> bool:
    """Whether the cache's positions inside the region are the tokens of `selection`."""
    first, last = selection.region
    last = min(last, cache.length)
    for number, layer in enumerate(cache.layers):
        bounds = selection.offsets[number * layer.heads :][: layer.heads + 1]
        wanted = selection.start[int(bounds[0]) : int(bounds[-1])]
        _, position, _ = layer.index()
        packed = position[(position >= first) & (position < last)]
        wanted = wanted[wanted < last].to(packed)
        if not torch.equal(packed, wanted):
            return False
    return True
