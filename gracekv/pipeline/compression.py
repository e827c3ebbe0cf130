"""`Pipeline`, and `Compression`: one run of it, layer by layer.

The loop scores each layer, records what later stages need of it, and keeps its best entries. Stages
that compare layers (hops, quotas over all scores, trees with one auction) run before the loop, over
a prefill that holds all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import Budget, BudgetPlan
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.top_tokens import candidates, check_scores, entry_gains
from gracekv.cache import CompressedCache, LayerToPack, RaggedCache, RaggedEntries, Timings
from gracekv.cache.pool import EntryPool
from gracekv.distributed.sharding import check_works_sharded
from gracekv.fit import NoFit
from gracekv.fit.base import check_dtype, value_change
from gracekv.pipeline.comparison import AcrossLayers, AuctionResult, run_across_layers, run_auction
from gracekv.pipeline.composition import Composition
from gracekv.pipeline.run import Run, account
from gracekv.precision.base import EXACT, AllocatingPrecision
from gracekv.prefill import CaptureInfo, LayerCapture, Needs, Prefill, Region
from gracekv.prefill.layer_state import LayerState
from gracekv.prefill.observations import Clock, seconds_by_stage
from gracekv.segment.tokens import token_slots
from gracekv.undo import full_float32
from gracekv.value.base import Memory, Relevance, mean_seed_scores


class Compression:
    """One run of a pipeline: call `layer` for each layer in ascending order, then `finish`.

    `run` does both for a prefill. Pipelines that need all layers at once (see
    `Composition.holds_all`) can only be run that way.

    Args:
        pipeline: the pipeline that compresses.
        plan: its budget in entries.
    """

    def __init__(self, pipeline: Composition, plan: BudgetPlan) -> None:
        self._pipeline, self._plan = pipeline, plan
        # The precision, if it chooses the bits of each entry.
        chooses = isinstance(pipeline.precision, AllocatingPrecision) and plan.bytes is not None
        self._allocating: Any = pipeline.precision if chooses else None
        self._memory: Memory = {}
        self._clock = Clock[str]()
        self._scores, self._past, self._omega = list[Tensor](), list[Tensor](), list[Tensor]()
        self._references, self._measured = list[Any](), list[Any]()
        self._whole: list[RaggedEntries] = []
        self._pool: EntryPool | None = None
        self._info: Any = None
        self._compared: AcrossLayers | None = None

    def run(self, prefill: Prefill) -> Run:
        """Compress a prefill, which holds all layers.

        Raises `MissingCaptureError` if it was captured for another pipeline.
        """
        pipe, info = self._pipeline, prefill.info
        needs = Needs()
        if not pipe.keeps_everything(self._plan, info.entry_bytes):
            needs, asked = pipe.needs(), []
            with self._stage("value", info.device):
                prefill = prefill.with_observations(needs.observers)
            if pipe.holds_all(self._plan, info.entry_bytes) is not None:
                stage = partial(self._stage, device=info.device)
                prefill, self._compared = run_across_layers(pipe, self._plan, prefill, stage)
            else:
                with self._stage("value", info.device):
                    asked.append(pipe.value.asks(prefill, self._region(info), self._memory))
            with self._stage("fit", info.device):
                asked.append(pipe.fit.asks(prefill, self._region(info), self._memory))
                prefill = prefill.with_queries(torch.cat([*asked, pipe.precision.asks(info.spans)]))
        for capture in prefill:
            self.layer(capture)
        facts = prefill.other_layers, seconds_by_stage(prefill.seconds, needs), prefill.fingerprint
        # A pool holds the kept entries, so the other keys and values are no longer needed.
        source = prefill if self._pool is None else None
        del capture, prefill
        return self.finish(*facts, source)

    def layer(self, capture: LayerCapture) -> None:
        """Score a layer, record what later stages need of it, and keep its best entries."""
        pipe, info, device = self._pipeline, capture.info, capture.keys.device
        self._info, region = info, self._region(info)
        if pipe.keeps_everything(self._plan, info.entry_bytes):
            with self._stage("pack", device):
                first, dim = info.spans.past, info.entry_dim
                keys, values = (x[:, first:-1, :dim] for x in (capture.keys, capture.values))
                self._whole.append(RaggedEntries.dense(keys, values, first))
            return
        with self._stage("value", device):
            if self._compared is None:
                scores, *past = pipe.value.with_past(capture, region, self._memory)
                self._past += past
                omega = pipe.sensitivity.layer(capture)
                self._scores.append(scores.to(info.device))
                self._omega.append(omega.to(info.device))
            else:
                scores = self._compared.relevance.scores[capture.number]
                omega = self._compared.relevance.sensitivity[capture.number]
        with self._stage("fit", device):
            self._references.append(pipe.fit.reference(capture, region, self._memory))
        if self._allocating is not None:
            with self._stage("precision", device):
                self._measured.append(self._allocating.measured(capture, region))
        if self._pools:
            with self._stage("allocate", device):
                if self._pool is None:
                    self._pool = EntryPool(info, region, self._plan.base)
                caps = self._caps(scores, capture.number)
                self._pool.add(capture, candidates(scores, omega, caps, pipe.allocate.elastic))

    def finish(
        self,
        other_layers: tuple[LayerState, ...],
        seconds: Mapping[str, float],
        fingerprint: Mapping[str, Any],
        prefill: Prefill | None = None,
    ) -> Run:
        """Choose and store the entries, after the last layer.

        Args:
            other_layers: states of the layers that are not compressed.
            seconds: seconds of the capture, by stage of `Timings`.
            fingerprint: identifies the model and the tokenizer.
            prefill: all layers, if they are in memory.
        """
        pipe, info, plan = self._pipeline, self._info, self._plan
        costs = pipe.precision.entry_bytes(info.entry_dim, info.dtype.itemsize, info.spans)
        # Bits are allocated only under a budget in bytes; otherwise entries stay exact.
        exact_only = isinstance(pipe.precision, AllocatingPrecision) and plan.bytes is None
        coded = None if exact_only else costs
        if self._whole:
            stored = replace(self._stored_whole(), other_layers=other_layers)
            accounting = account(info, plan, stored, None, coded)
            timings = Timings(**seconds, **self._clock.seconds())
            return Run(plan, stored, accounting, timings, fingerprint)
        with self._stage("value", info.device):
            if (compared := self._compared) is None:
                scores, omega = torch.stack(self._scores), torch.stack(self._omega)
                self._scores.clear()
                check_scores(scores, omega, signed=False)
                relevance = Relevance(scores, mean_seed_scores(scores, shard=info.shard), omega)
                compared = AcrossLayers(relevance, token_slots(self._region(info)))
        with self._stage("allocate", info.device):
            result, relevance = self._bought(compared, costs), compared.relevance
        with self._stage("pack", info.device):
            entries = self._pack(result, relevance, prefill)
            packed, starts, indices = map(tuple, zip(*entries, strict=True))
        cache = RaggedCache(packed, length=info.spans.length - 1)
        with self._stage("precision", info.device):
            widths = self._widths(starts, indices, result)
            rounded = pipe.precision.keys_as_read(cache, widths, info.entry_dim)
        with self._stage("fit", info.device):
            # Values are fitted to the keys that decoding will read, which may be rounded.
            if pipe.fit.by_score:
                pairs = zip(self._references, relevance.scores, strict=True)
                self._references = [replace(x, scores=score) for x, score in pairs]
            fitted = pipe.fit.layers(rounded, self._references, self._region(info))
            for old, new in zip(cache.layers, fitted.layers, strict=True):
                check_dtype(pipe.fit, old, new)
            change = None if isinstance(pipe.fit, NoFit) else value_change(cache, fitted)
        with self._stage("precision", info.device):
            exact = fitted.with_keys_of(cache, rounded, info.entry_dim)
            stored = replace(pipe.precision(exact, widths), other_layers=other_layers)
        accounting = account(info, result.plan, stored, result, coded)
        timings = Timings(**seconds, **self._clock.seconds())
        return Run(
            plan=result.plan, cache=stored, accounting=accounting, timings=timings,
            fingerprint=fingerprint, partition=compared.partition, relevance=relevance,
            forest=compared.forest, floor=result.floor, frontier=result.frontier,
            selection=result.selection, value_change=change,
            past=tuple(x.cpu() for x in self._past) or None, merges=pipe.pack.represents == "node",
        )  # fmt: skip

    def _region(self, info: CaptureInfo) -> Region:
        """The compressible positions."""
        return info.spans.region(self._plan.recent)

    @property
    def _pools(self) -> bool:
        """Whether a pool of entries suffices: a top-k of single tokens without merging."""
        pipe, compared = self._pipeline, self._compared
        by_bytes = self._plan.bytes is not None and not pipe.quota.monotone
        tokens = compared is None or pipe.selects_tokens(compared.partition)
        return tokens and pipe.pack.by_entry and not by_bytes

    @contextmanager
    def _stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Time a stage and run it with matrix products in full float32."""
        with self._clock.time(name, device), full_float32():
            yield

    def _caps(self, scores: Tensor, number: int) -> Tensor | None:
        """int64 [G] most entries of each head of a layer with scores [G, N], or None."""
        if (compared := self._compared) is None:
            caps = self._pipeline.quota.layer(scores, number, self._plan)
        else:
            caps = None if compared.quota is None else compared.quota[number]
        return None if caps is None else self._info.shard.own_heads(caps, 0)

    def _bought(self, compared: AcrossLayers, costs: EntryBytes | None) -> AuctionResult:
        """The entries that the budget buys, and their widths if bits are allocated."""
        pipe, plan, pool, info = self._pipeline, self._plan, self._pool, self._info
        if self._allocating is None or plan.bytes is None or costs is None:
            if pool is None or (plan.bytes is not None and costs is not None):
                return run_auction(pipe, info, compared, plan, costs)
            return AuctionResult(plan, pool.selection(), pool.utility())
        if pool is None:
            selection = run_auction(pipe, info, compared, plan, None).selection
        else:
            selection = pool.selection()
        relevance = compared.relevance
        gains = entry_gains(relevance.scores, relevance.sensitivity, selection)
        budget = plan.bytes - (plan.total - plan.base) * costs.exact
        widths = self._allocating.allocate(info, self._measured, selection, gains, budget)
        stays = widths > 0
        selection = selection.where(stays)
        total = plan.total - plan.base + info.shard.total(selection.entries)
        utility = float(gains.cpu()[stays].sum())
        return AuctionResult(replace(plan, total=total), selection, utility, widths=widths[stays])

    def _pack(
        self, result: AuctionResult, relevance: Relevance, prefill: Prefill | None
    ) -> Iterator[tuple[RaggedEntries, Tensor, Tensor]]:
        """Yield for each layer its packed entries, the first position [E] of each, and the index
        [E] of each in the selection, -1 outside the region.
        """
        if self._pool is not None:
            yield from ((x, x.positions, at) for x, at in self._pool.pop(result.selection))
            return
        assert prefill is not None  # only a pool needs none
        rule, spans = self._pipeline.prototype, prefill.spans
        layouts = result.selection.layouts(spans.length, prefill.keys, spans.past)
        for capture, layout in zip(prefill, layouts, strict=True):
            given = LayerToPack(capture, layout, relevance.scores[capture.number], rule)
            yield self._pipeline.pack.layer(given), layout.start, layout.selected

    def _widths(
        self, starts: Sequence[Tensor], indices: Sequence[Tensor], result: AuctionResult
    ) -> list[Tensor]:
        """For each layer uint8 [E], the widths of its packed entries; see `_pack`."""
        if result.widths is None:
            region, precision = self._region(self._info), self._pipeline.precision
            return [precision.widths(start, region) for start in starts]
        # The padding is the width of entries outside the region, whose index is -1.
        every = torch.nn.functional.pad(result.widths.cpu(), (0, 1), value=EXACT)
        index = torch.cat([x.to(indices[0].device) for x in indices]).cpu()
        return list(every[index].split([len(x) for x in indices]))

    def _stored_whole(self) -> CompressedCache:
        """Every token of every layer, stored by the precision."""
        pipe, plan, region = self._pipeline, self._plan, self._region(self._info)
        if not pipe.keep_all and plan.holds(self._info.entry_bytes):
            region = Region(region.start, region.start)
        cache = RaggedCache(tuple(self._whole), length=self._info.spans.length - 1)
        with self._stage("precision", self._info.device):
            widths = [pipe.precision.widths(layer.positions, region) for layer in cache.layers]
            return pipe.precision(cache, widths)


@dataclass(frozen=True, kw_only=True)
class Pipeline(Composition):
    """Compression as a composition of strategies.

    `Pipeline.named("gracekv")` is the paper's method, `Pipeline.default` the default of `compress`.
    Change one stage with `dataclasses.replace(pipeline, floor=FLOORS.build("none"))`, or from plain
    data with `Pipeline.from_dict({"floor": "none"})`, whose other fields are the paper's. In the
    constructor, the paper's stages and the window have no defaults.

    Attributes: see `Composition`.
    """

    def run(self, prefill: Prefill, budget: Budget) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack, fit, precision.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline.
        """
        plan = self.plan(prefill, budget)
        check_works_sharded(self, prefill.shard)
        return Compression(self, plan).run(prefill)
