"""`Pipeline`: the method as a value, one strategy a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from torch import Tensor

from gracekv import recipes
from gracekv.allocate import (
    Allocator,
    Budget,
    BudgetPlan,
    Floor,
    NoFloor,
    Quota,
    RecentWindow,
)
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.backends import Auto, Backend
from gracekv.cache import Packer, Timings
from gracekv.distributed.head_shard import all_heads
from gracekv.distributed.strategies import check_works_sharded
from gracekv.errors import ConfigError, ShapeError
from gracekv.fit import Fitter, NoFit
from gracekv.fit.base import value_change
from gracekv.kernels.linalg import full_float32
from gracekv.pipeline.auction import Auction
from gracekv.pipeline.run import Run, accounted, full_run
from gracekv.pipeline.timing import StageClock
from gracekv.precision import FullPrecision, Precision
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import Configurable
from gracekv.segment import Curvature, Partition, Segmenter
from gracekv.tree import (
    Distortion,
    PrototypeRule,
    Refiner,
    TreeContext,
    Unit,
    build_forest,
)
from gracekv.value import (
    Relevance,
    Scorer,
    Sensitivity,
)
from gracekv.value.attention import all_column_sums


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
        precision: how many bits their numbers take (ours; the paper's is `full`).
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
    precision: Precision = field(default_factory=FullPrecision)
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

    def check(self) -> None:
        if self.keep_all and self.precision.allocates:
            raise ConfigError("keep_all has no budget to allocate bits by: use 'uniform'.")

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
            heads=all_heads(prefill.kv_heads, prefill.shard),
            context=prefill.spans.context_length,
            entry_bytes=prefill.entry_bytes,
            window=self.window,
            costs=self._entry_bytes(prefill),
        )

    def _entry_bytes(self, prefill: Prefill) -> EntryBytes | None:
        itemsize = prefill.keys[0].element_size()
        return self.precision.entry_bytes(prefill.entry_dim, itemsize, prefill.spans)

    def run(self, prefill: Prefill, budget: Budget, partition: Partition | None = None) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack, fit, precision.

        With `partition`, slots that were found before for the same region, nothing is segmented.
        Where slots are single tokens that stay or go, the auction is a top-k, without trees.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline, `ShapeError` if `partition` covers another region.
        """
        check_works_sharded(self, prefill.shard)
        plan, costs = self.plan(prefill, budget), self._entry_bytes(prefill)
        if self.keep_all or self.precision.keeps_all(plan, prefill.entry_bytes):
            return full_run(prefill, plan, self.precision, costs, quantise=self.keep_all)
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
            relevance, column_sums = self._relevance(prefill, region)
        with full_float32(), clock("tree"):
            quota = self.quota(relevance.scores, plan, column_sums)
            forest, candidates, curvature = None, None, partition.curvature
            grows = not self._selects_tokens(partition)
            if grows and curvature is None and self.refine.uses_curvature:
                curvature = Curvature()(prefill)
            # Freed unless the caller holds the prefill, too.
            prefill = prefill.without("hidden")
            if grows:
                candidates = self.floor.candidates(relevance.scores, plan, prefill.shard)
                context = TreeContext(
                    prefill=prefill,
                    partition=partition,
                    scores=relevance.scores,
                    seed_scores=relevance.seed_scores,
                    sensitivity=relevance.sensitivity,
                    rule=self.prototype,
                    forced=candidates,
                    curvature=curvature,
                )
                limit = plan.base if self._prunes(quota) else None
                forest = build_forest(context, self.distortion, self.refine, limit)
        with clock("allocate"):
            auction = Auction(
                self.floor, self.allocate, self.certify, region.start, relevance, forest,
                candidates, prefill.shard,
            )  # fmt: skip
            quota_of = partial(self.quota, relevance.scores, columns=column_sums)
            plan, chosen = auction.spend(plan, costs, quota, quota_of, self.precision, prefill)
        selection, frontier = chosen.selection, chosen.frontier
        with full_float32(), clock("pack"):
            cache = self.pack(prefill, selection, relevance.scores, self.prototype, column_sums)
        with clock("precision"):
            widths = chosen.packed_widths(prefill, region, self.precision)
            read = self.precision.keys_as_read(cache, widths, prefill.entry_dim)
        with full_float32(), clock("fit"):
            # Values make up for what decoding will read, rounded keys included.
            fitted = self.fit(prefill, region, read)
            change = None if fitted is read else value_change(cache, fitted)
        with clock("precision"):
            exact = fitted.with_keys_of(cache).narrowed(prefill.entry_dim)
            stored = self.precision(exact, widths).with_kept(prefill.kept)
            del cache, read, fitted, exact
        accounting = accounted(
            prefill,
            plan,
            stored,
            selection.per_head() + plan.recent,
            costs,
            floor_spent=0 if frontier is None else frontier.floor_spent,
            utility=chosen.utility,
            bound=None if frontier is None else frontier.bound,
        )
        return Run(
            plan=plan,
            cache=stored,
            accounting=accounting,
            timings=Timings(**prefill.seconds_for(self.needs()), **clock.seconds),
            fingerprint=prefill.fingerprint,
            partition=partition,
            relevance=relevance,
            forest=forest,
            floor=chosen.start,
            frontier=frontier,
            selection=selection,
            elastic=auction.elastic,
            value_change=change,
        )

    def _relevance(self, prefill: Prefill, region: Region) -> tuple[Relevance, Tensor | None]:
        """Scores and sensitivity; column sums [L, H, T] if some stage reads them."""
        found = self.value(prefill, region)
        relevance = Relevance(found.scores, found.seed_scores, self.sensitivity(prefill))
        if found.column_sums is None and self.uses_column_sums:
            return relevance, all_column_sums(prefill)
        return relevance, found.column_sums

    def _selects_tokens(self, partition: Partition) -> bool:
        """Whether slots are single tokens that stay or go, each at a gain of omega R."""
        return (
            partition.slots == partition.region.length
            and isinstance(self.distortion, Unit)
            and isinstance(self.floor, NoFloor)
            and self.allocate.prunable
            and not self.certify
        )

    def _prunes(self, quota: Tensor | None) -> bool:
        return self.prune and self.allocate.prunable and quota is None and not self.certify
