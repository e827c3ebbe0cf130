"""`Pipeline`: the method as a value, one strategy a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from gracekv import recipes
from gracekv.allocate import (
    ALLOCATORS,
    FLOORS,
    QUOTAS,
    Allocator,
    Budget,
    BudgetPlan,
    Floor,
    Frontier,
    Quota,
    RecentWindow,
    upper_bound,
)
from gracekv.backends import BACKENDS, Auto, Backend
from gracekv.cache import (
    PACKERS,
    Accounting,
    Packer,
    RaggedCache,
    RaggedLayer,
    Timings,
)
from gracekv.errors import ShapeError
from gracekv.fit import FITTERS, Fitter, NoFit
from gracekv.linalg import full_float32
from gracekv.prefill import Needs, Prefill
from gracekv.registry import Configurable, Registry
from gracekv.segment import SEGMENTERS, Curvature, Partition, Segmenter
from gracekv.timing import StageClock
from gracekv.tree import (
    DISTORTIONS,
    REFINERS,
    Distortion,
    Forest,
    PrototypeRule,
    Refiner,
    TreeContext,
    build_forest,
)
from gracekv.value import (
    SCORERS,
    SENSITIVITIES,
    Relevance,
    Scorer,
    Sensitivity,
)
from gracekv.value.attention import all_column_sums

REGISTRIES: dict[str, Registry[Any]] = {
    "segment": SEGMENTERS,
    "value": SCORERS,
    "sensitivity": SENSITIVITIES,
    "distortion": DISTORTIONS,
    "refine": REFINERS,
    "floor": FLOORS,
    "quota": QUOTAS,
    "allocate": ALLOCATORS,
    "pack": PACKERS,
    "fit": FITTERS,
    "backend": BACKENDS,
}


def strategies() -> dict[str, dict[str, str]]:
    """Every registered strategy: {stage: {name: one-line description}}."""
    return {
        stage: {name: registry.get(name).summary() for name in registry}
        for stage, registry in REGISTRIES.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What each stage of one pipeline run made; stages that FullKV skips are None.

    Attributes:
        plan: the budget in entries.
        partition: slots.
        relevance: token worth and head sensitivity.
        forest: all candidate nodes.
        frontier: which nodes stay.
        cache: the physical entries.
        accounting: entries and bytes.
        timings: seconds per stage.
        floor: what the floor had bought when the auction began.
    """

    plan: BudgetPlan
    partition: Partition | None
    relevance: Relevance | None
    forest: Forest | None
    frontier: Frontier | None
    cache: RaggedCache
    accounting: Accounting
    timings: Timings
    floor: Frontier | None = None


@dataclass(frozen=True, kw_only=True)
class Pipeline(Configurable):
    """Compression as a composition of strategies.

    `Pipeline.named("gracekv")` is the paper's method, `Pipeline.default()` what `compress` uses.
    Change one stage with `dataclasses.replace(pipeline, floor=FLOORS.build("none"))`, or in plain
    data with `Pipeline.from_dict({"floor": "none"})`, whose other fields are the paper's. The
    constructor takes every stage by name: it has no defaults of its own.

    Attributes:
        segment: where the context is cut into slots.
        value: the score of each token.
        sensitivity: the weight of each KV head.
        distortion: what merging or dropping an interval costs.
        refine: into which children a node splits.
        prototype: how the tokens of a node are merged.
        floor: which exact tokens are protected before the auction.
        quota: how many entries each head may hold.
        allocate: which operations the budget buys.
        pack: how a chosen node becomes an entry.
        fit: how kept entries make up for dropped ones (ours; the paper's is `none`).
        window: the recent window.
        backend: the attention implementation that decoding reads the cache with.
        keep_all: ignore the budget and keep everything (FullKV).
        certify: also bound from above what any allocation over the same trees could reach, floor
            or not: `accounting.bound` and `accounting.certified_ratio` (ours).
        prune: do not grow what the greedy auction cannot reach (ours, exact: same entries, smaller
            forest). Only where it holds: a greedy allocator without quota or certificate.
    """

    segment: Segmenter
    value: Scorer
    sensitivity: Sensitivity
    distortion: Distortion
    refine: Refiner
    prototype: PrototypeRule
    floor: Floor
    quota: Quota
    allocate: Allocator
    pack: Packer
    window: RecentWindow
    fit: Fitter = field(default_factory=NoFit)
    backend: Backend = field(default_factory=Auto)
    keep_all: bool = False
    certify: bool = False
    prune: bool = True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], base: str = "gracekv") -> Self:
        """A pipeline from plain data; fields left out are those of the recipe `base`, the paper's.

        Raises `ConfigError` on an unknown field or a value of the wrong type,
        `UnknownStrategyError` for an unknown recipe or strategy.
        """
        if isinstance(data, Mapping):
            data = {**recipes.PAPER, **recipes.find(base).pipeline, **data}
        return super().from_dict(data)

    @classmethod
    def named(cls, name: str) -> Self:
        """The recipe of that name; `gracekv.recipes.names()` lists them.

        Raises `UnknownStrategyError` if there is none.
        """
        return cls.from_dict({}, base=name)

    @classmethod
    def default(cls, *, question: bool = True) -> Self:
        """What `gracekv.compress` and the command line use unless told otherwise.

        `question` says whether the prompt has one: `recipes.DEFAULT`, or
        `recipes.DEFAULT_WITHOUT_QUESTION`.
        """
        return cls.named(recipes.DEFAULT if question else recipes.DEFAULT_WITHOUT_QUESTION)

    def needs(self) -> Needs:
        """What the capture must keep for this pipeline."""
        if self.keep_all:
            return Needs()
        needs = self.segment.needs() | self.value.needs() | self.sensitivity.needs()
        needs |= self.distortion.needs() | self.fit.needs()
        if self.uses_column_sums:
            needs |= Needs(column_sums=True)
        needs |= Needs(recent=self.window.size)
        return needs | Curvature().needs() if self.refine.uses_curvature else needs

    @property
    def uses_column_sums(self) -> bool:
        """Some stage reads the attention that each prompt position received in all."""
        return self.quota.uses_column_sums or self.pack.uses_column_sums

    def plan(self, prefill: Prefill, budget: Budget) -> BudgetPlan:
        """What `budget` comes to for this prefill; raises `BudgetError` if it is too small."""
        return budget.plan(
            layers=prefill.layers,
            heads=prefill.kv_heads,
            context=prefill.spans.context_length,
            entry_bytes=prefill.entry_bytes,
            window=self.window,
        )

    def run(self, prefill: Prefill, budget: Budget, partition: Partition | None = None) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack.

        The paper's two flows: worth rises from tokens to roots, budget falls from roots to leaves.
        With `partition`, slots that were found before for the same region, nothing is segmented.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline, `ShapeError` if `partition` covers another region.
        """
        plan = self.plan(prefill, budget)
        if self.keep_all or plan.keeps_all:
            return _full(prefill, plan)
        clock = StageClock(prefill.keys[0].device)
        region = prefill.spans.region(plan.recent)
        with full_float32(), clock("segment"):
            if partition is None:
                partition = self.segment(prefill, region)
        if partition.region != region:
            raise ShapeError(
                f"The partition covers {partition.region}, this prompt and budget leave {region} "
                f"to compress. Segment again, or keep context and budget the same."
            )
        with full_float32(), clock("value"):
            scores = self.value(prefill, region)
            relevance = Relevance(scores.scores, scores.seed_scores, self.sensitivity(prefill))
            column_sums = scores.column_sums
            if column_sums is None and self.uses_column_sums:
                column_sums = all_column_sums(prefill)
        with full_float32(), clock("tree"):
            quota = self.quota(relevance.scores, plan, column_sums)
            candidates = self.floor.candidates(relevance.scores, plan)
            curvature = partition.curvature
            if curvature is None and self.refine.uses_curvature:
                curvature = Curvature()(prefill)
            # Freed unless the caller holds the prefill, too.
            prefill = prefill.without("hidden")
            forest = build_forest(
                TreeContext(
                    prefill=prefill,
                    partition=partition,
                    scores=relevance.scores,
                    seed_scores=relevance.seed_scores,
                    sensitivity=relevance.sensitivity,
                    rule=self.prototype,
                    forced=candidates,
                    curvature=curvature,
                ),
                self.distortion,
                self.refine,
                plan.base if self._prunes(quota) else None,
            )
        with clock("allocate"):
            start = self.floor.realize(forest, candidates, plan, quota)
            frontier = self.allocate(start, quota)
            if self.certify:
                elastic = bool(getattr(self.allocate, "elastic", False))
                empty = Frontier.empty(forest, plan.base)
                bound = upper_bound(empty, quota, elastic=elastic)
                frontier = replace(frontier, bound=max(bound, frontier.utility))
        with full_float32(), clock("pack"):
            cache = self.pack(prefill, frontier, relevance.scores, self.prototype, column_sums)
        with full_float32(), clock("fit"):
            fitted = self.fit(prefill, region, cache)
            cache = fitted.cache
        entries = frontier.entries_per_head().cpu() + plan.recent
        accounting = Accounting(
            budget=plan.total,
            spent=int(entries.sum()),
            floor_spent=frontier.floor_spent,
            recent=plan.recent,
            entries=entries,
            bytes=cache.kv_bytes,
            metadata_bytes=cache.metadata_bytes,
            full_bytes=_full_bytes(prefill),
            utility=frontier.utility,
            bound=frontier.bound,
        )
        timings = Timings(**prefill.seconds_for(self.needs()), **clock.seconds)
        return Run(plan, partition, relevance, forest, frontier, cache, accounting, timings, start)

    def _prunes(self, quota: Tensor | None) -> bool:
        return self.prune and self.allocate.prunable and quota is None and not self.certify


def _full(prefill: Prefill, plan: BudgetPlan) -> Run:
    """Every token as it is."""
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
        full_bytes=_full_bytes(prefill),
    )
    timings = Timings(**prefill.seconds_for(Needs()), **clock.seconds)
    return Run(plan, None, None, None, None, cache, accounting, timings)


def _full_bytes(prefill: Prefill) -> int:
    return prefill.layers * prefill.kv_heads * (prefill.spans.length - 1) * prefill.entry_bytes
