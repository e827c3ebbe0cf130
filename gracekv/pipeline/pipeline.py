"""`Pipeline`: the method as a value, one strategy a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
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
    Selection,
)
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.backends import Auto, Backend
from gracekv.cache import Packer, RaggedCache, Timings
from gracekv.decode import Decoder, NoCut
from gracekv.distributed.sharding import check_works_sharded
from gracekv.errors import ConfigError
from gracekv.fit import Fitter, NoFit
from gracekv.pipeline.auction import Auction
from gracekv.pipeline.run import Run, accounted, finished, timed, whole_cache
from gracekv.precision import AllocatingPrecision, FullPrecision, Precision
from gracekv.prefill import Needs, Prefill, PromptSpans
from gracekv.prefill.model_layers import compressed_layers, head_sizes
from gracekv.registry import Configurable
from gracekv.segment import Curvature, Partition, Segmenter
from gracekv.segment.curvature import BlockInput
from gracekv.tree import Distortion, Forest, PrototypeRule, Refiner, TreeContext, Unit
from gracekv.tree.build import build_forest
from gracekv.value import Relevance, Scorer, Sensitivity
from gracekv.value.column_sums import ReceivedAttention


@dataclass(frozen=True, kw_only=True)
class Pipeline(Configurable):
    """Compression as a composition of strategies.

    `Pipeline.named("gracekv")` is the paper's method, `Pipeline.default` what `compress` uses.
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
        decode: what stays while generating under a `gracekv.Limit` that names no strategy (ours;
            the paper's is `none`).
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
    decode: Decoder = field(default_factory=NoCut)
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
    def default(cls, *, question: bool = True, per_byte: bool = False) -> Self:
        """What `gracekv.compress` and the command line use unless told; see `recipes.default`."""
        return cls.named(recipes.default(question=question, per_byte=per_byte))

    def check(self) -> None:
        if self.keep_all and isinstance(self.precision, AllocatingPrecision):
            raise ConfigError("keep_all has no budget to allocate bits by: use 'uniform'.")

    def needs(self) -> Needs:
        """What the capture must keep for this pipeline."""
        if self.keep_all:
            return Needs()
        needs = self.segment.needs() | self.value.needs() | self.sensitivity.needs()
        needs |= self.distortion.needs() | self.fit.needs() | self.pack.needs()
        if self.quota.uses_column_sums:
            needs |= Needs.observed(ReceivedAttention())
        needs |= Needs(recent=self.window.size)
        return needs | Curvature().needs() if self.refine.uses_curvature else needs

    def plan(self, prefill: Prefill, budget: Budget) -> BudgetPlan:
        """What `budget` comes to for this prefill; raises `BudgetError` if it is too small."""
        heads, size = prefill.kv_heads * prefill.shard.ranks, prefill.keys[0].element_size()
        return self._plan(prefill.layers, heads, prefill.entry_dim, size, prefill.spans, budget)

    def plan_for(self, model: Any, spans: PromptSpans, budget: Budget) -> BudgetPlan:
        """As `plan`, from the model's config and the spans."""
        _, heads, dim = head_sizes(model)
        layers = len(compressed_layers(model))
        return self._plan(layers, heads, dim, model.dtype.itemsize, spans, budget)

    def _plan(
        self, layers: int, heads: int, dim: int, size: int, spans: PromptSpans, budget: Budget
    ) -> BudgetPlan:
        """The entries of heads of dimension `dim`, whose numbers take `size` bytes."""
        return budget.plan(
            layers=layers,
            heads=heads,
            context=spans.context_length,
            entry_bytes=2 * dim * size,
            window=self.window,
            costs=self.precision.entry_bytes(dim, size, spans),
        )

    @property
    def elastic(self) -> bool:
        """Whether budget is left unspent rather than buy what gains nothing."""
        return bool(getattr(self.allocate, "elastic", False))

    def costs(self, prefill: Prefill) -> EntryBytes | None:
        """What entries cost, if budgets count bytes; None: they count entries."""
        size = prefill.keys[0].element_size()
        return self.precision.entry_bytes(prefill.entry_dim, size, prefill.spans)

    def run(self, prefill: Prefill, budget: Budget) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack, fit, precision.

        Where slots are single tokens that stay or go, the auction is a top-k, without trees.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline.
        """
        check_works_sharded(self, prefill.shard)
        plan, first = self.plan(prefill, budget), prefill.keys[0]
        seconds: dict[str, float] = {}
        stage = partial(timed, first.device, seconds)
        if self.keep_all or self.precision.keeps_all(plan, prefill.entry_bytes):
            stored = whole_cache(prefill, plan, self.precision, stage, quantise=self.keep_all)
            timings = Timings(**prefill.seconds_for(Needs()), **seconds)
            kept = accounted(prefill, plan, stored, None, self.costs(prefill))
            return Run(plan, stored, kept, timings, prefill.fingerprint)
        region = prefill.spans.region(plan.recent)
        with stage("segment"):
            partition = self.segment(prefill, region)
        with stage("value"):
            prefill = prefill.with_observations(self.needs().observers)
            scored = self.value(prefill, region)
            relevance = Relevance(scored.scores, scored.seed_scores, self.sensitivity(prefill))
        with stage("tree"):
            columns = self.quota.uses_column_sums
            read = prefill.observation(ReceivedAttention()) if columns else relevance.scores
            quota = cache(partial(self.quota, read))
            curvature = self._curvature(prefill, partition)
            # Freed unless the caller holds the prefill, too.
            prefill = prefill.without(BlockInput)
            forest, candidates = self._trees(prefill, partition, relevance, curvature, plan, quota)
        measured = []
        if isinstance(self.precision, AllocatingPrecision):
            with stage("precision"):
                layers = range(prefill.layers)
                measured = [self.precision.measured(prefill, x, region) for x in layers]
        auction = Auction(self, prefill, quota, relevance, forest, candidates, measured)

        def packed(selection: Selection) -> RaggedCache:
            return self.pack(prefill, selection, relevance.scores, self.prototype)

        fitted = partial(self.fit, prefill, region)
        return finished(auction, plan, partition, packed, fitted, seconds)

    def _curvature(self, prefill: Prefill, partition: Partition) -> Tensor | None:
        """kappa [T] where trees are grown by it, which needs the hidden states."""
        if partition.curvature is None and self.refine.uses_curvature:
            return None if self._selects_tokens(partition) else Curvature()(prefill)
        return partition.curvature

    def _trees(
        self,
        prefill: Prefill,
        partition: Partition,
        relevance: Relevance,
        curvature: Tensor | None,
        plan: BudgetPlan,
        quota: Callable[[BudgetPlan], Tensor | None],
    ) -> tuple[Forest | None, Tensor | None]:
        """The trees and the floor's candidates; None where the auction is a top-k."""
        if self._selects_tokens(partition):
            return None, None
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
        prunes = self.prune and self.allocate.prunable and not self.certify
        limit = plan.base if prunes and quota(plan) is None else None
        return build_forest(context, self.distortion, self.refine, limit), candidates

    def _selects_tokens(self, partition: Partition) -> bool:
        """Whether slots are single tokens that stay or go, each at a gain of omega R."""
        return partition.slots == partition.region.length and self.keeps_or_drops

    @property
    def keeps_or_drops(self) -> bool:
        """Whether a slot of one token stays or goes at a gain of omega R, in one auction."""
        return (
            isinstance(self.distortion, Unit)
            and isinstance(self.floor, NoFloor)
            and self.allocate.prunable
            and not self.certify
        )
