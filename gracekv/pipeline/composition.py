"""`Composition`: one strategy per stage; `strategies` lists all that are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gracekv import recipes
from gracekv.allocate import BudgetPlan, NoFloor
from gracekv.allocate.base import ALLOCATORS, FLOORS, QUOTAS, Allocator, Floor, Quota
from gracekv.allocate.budget import Budget, RecentWindow
from gracekv.backends import BACKENDS, Auto, Backend
from gracekv.cache import PACKERS, Packer
from gracekv.decode import DECODERS, Decoder, NoCut
from gracekv.errors import ConfigError, expect
from gracekv.fit import FITTERS, Fitter, NoFit
from gracekv.precision import PRECISIONS, AllocatingPrecision, FullPrecision, Precision
from gracekv.prefill import Needs, Prefill, PromptSpans
from gracekv.prefill.model_layers import cache_dtype, compressed_layers, head_sizes
from gracekv.registry import Configurable, Registry, Strategy
from gracekv.registry.hyperparameter import parts_of
from gracekv.segment import SEGMENTERS, Curvature, Partition, Segmenter, Tokens
from gracekv.tree import DISTORTIONS, REFINERS, Distortion, PrototypeRule, Refiner, Unit
from gracekv.value import SCORERS, SENSITIVITIES, Scorer, Sensitivity
from gracekv.value.column_sums import ReceivedAttention


@dataclass(frozen=True, kw_only=True)
class Composition(Configurable):
    """One strategy per stage: the fields of a `Pipeline`.

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
        fit: how kept entries compensate for dropped ones (ours; the paper's is `none`).
        precision: bits per number of kept entries (ours; the paper's is `full`).
        decode: which entries stay during generation under a `gracekv.Limit` that names no strategy
            (ours; the paper's is `none`).
        window: the recent window.
        backend: the attention implementation for decoding.
        keep_all: keep everything (FullKV). The budget only has to hold the recent window.
        certify: also bound the utility of any allocation over the same trees, with or without a
            floor: `accounting.bound` and `accounting.certified_ratio` (ours). There is no such
            bound if bits are allocated.
        prune: do not grow nodes that the greedy auction cannot reach (ours, exact: same entries,
            smaller forest). Used only where this is exact: a greedy allocator without quota or
            certificate.
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
        """A pipeline from plain data; missing fields are those of the recipe `base`.

        Raises `ConfigError` for an unknown field or a value of the wrong type,
        `UnknownStrategyError` for an unknown recipe or strategy.
        """
        if isinstance(data, Mapping):
            recipe = {**recipes.PAPER, **recipes.find(base).pipeline}
            parts = [x for x in ("window", "prototype") if isinstance(data.get(x), Mapping)]
            old = {x: recipe.get(x, {}) for x in parts}
            plain = {k: x if isinstance(x, Mapping) else x.to_dict() for k, x in old.items()}
            data = {**recipe, **data, **{x: {**plain[x], **data[x]} for x in parts}}
        return super().from_dict(data)

    @classmethod
    def named(cls, name: str) -> Self:
        """The recipe of that name; `gracekv.recipes.names()` lists them.

        Raises `UnknownStrategyError` if there is none.
        """
        return cls.from_dict({}, base=name)

    @classmethod
    def default(cls, *, question: bool = True, per_byte: bool = False) -> Self:
        """The default of `gracekv.compress` and the command line; see `recipes.default`."""
        return cls.named(recipes.default(question=question, per_byte=per_byte))

    def check(self) -> None:
        for part in parts_of(self):
            if isinstance(part, Strategy):
                part.registry.parse(part)
        if self.keep_all and isinstance(self.precision, AllocatingPrecision):
            raise ConfigError("keep_all has no budget to allocate bits by: use 'uniform'.")

    def needs(self) -> Needs:
        """The parts of a prefill that the capture must keep for this pipeline."""
        if self.keep_all:
            return Needs()
        needs = self.segment.needs() | self.value.needs() | self.sensitivity.needs()
        needs |= self.distortion.needs() | self.fit.needs() | self.pack.needs()
        if self.quota.uses_column_sums:
            needs |= Needs.observed(ReceivedAttention())
        needs |= Needs(recent=self.window.size)
        # Slots of one token are not cut.
        cuts = self.refine.uses_curvature and not self._chooses_tokens
        return needs | Curvature().needs() if cuts else needs

    def plan(self, prefill: Prefill, budget: Budget) -> BudgetPlan:
        """`budget` in entries of this prefill; raises `BudgetError` if it is too small."""
        expect(prefill, Prefill, "A pipeline compresses what gracekv.capture returns")
        expect(budget, Budget, "budget takes a gracekv.Budget, such as Budget.ratio(8)")
        info = prefill.info
        heads, size = info.kv_heads * info.shard.ranks, info.dtype.itemsize
        return self._plan(info.layers, heads, info.entry_dim, size, info.spans, budget)

    def plan_for(self, model: Any, spans: PromptSpans, budget: Budget) -> BudgetPlan:
        """Like `plan`, from the model's config and the spans."""
        _, heads, dim = head_sizes(model)
        layers = len(compressed_layers(model))
        return self._plan(layers, heads, dim, cache_dtype(model).itemsize, spans, budget)

    def _plan(
        self, layers: int, heads: int, dim: int, size: int, spans: PromptSpans, budget: Budget
    ) -> BudgetPlan:
        """The plan for heads of dimension `dim` whose numbers take `size` bytes."""
        return budget.plan(
            layers=layers,
            heads=heads,
            context=spans.context_length,
            entry_bytes=2 * dim * size,
            window=self.window,
            costs=self.precision.entry_bytes(dim, size, spans),
        )

    def keeps_everything(self, plan: BudgetPlan, entry_bytes: int) -> bool:
        """Whether every token stays; arguments as in `holds_all`."""
        return self.keep_all or self.precision.keeps_all(plan, entry_bytes)

    def holds_all(self, plan: BudgetPlan, entry_bytes: int) -> str | None:
        """The reason why this pipeline needs all layers at once, or None if it does not.

        Args:
            plan: its budget in entries.
            entry_bytes: bytes of a K/V pair in the model's dtype.
        """
        if self.keeps_everything(plan, entry_bytes):
            return "it keeps everything"
        if not (self._chooses_tokens and self.pack.by_entry):
            return "it does more than choose among single tokens"
        parts = [(getattr(self, x), x) for x in ("value", "sensitivity", "quota", "fit")]
        if compared := [f"{x.name!r} ({stage})" for x, stage in parts if x.compares_layers]:
            return f"{' and '.join(compared)} compare layers"
        if self.quota.uses_column_sums:
            return "its quotas read column sums of all layers"
        if plan.bytes is not None and not self.quota.monotone:
            return "quotas depend on how many entries the bytes buy, known only at the end"
        read = {state for observer in self.needs().observers for state in observer.reads}
        if "passes" in read:
            return "the model runs once more over all keys and values"
        if "final" in read:
            return "it reads the decoder's output, which comes last"
        return None

    def selects_tokens(self, partition: Partition) -> bool:
        """Whether slots are single tokens that are kept or dropped, each with a gain of omega R."""
        return partition.slots == partition.region.length and self.keeps_or_drops

    @property
    def _chooses_tokens(self) -> bool:
        """Whether every slot is a single token that is kept or dropped."""
        return isinstance(self.segment, Tokens) and self.keeps_or_drops

    @property
    def keeps_or_drops(self) -> bool:
        """Whether a one-token slot is kept or dropped, with a gain of omega R, in one auction."""
        return (
            isinstance(self.distortion, Unit)
            and isinstance(self.floor, NoFloor)
            and self.allocate.prunable
            and not self.certify
        )


_EVERY: tuple[Registry[Any], ...] = (
    SEGMENTERS, SCORERS, SENSITIVITIES, DISTORTIONS, REFINERS, FLOORS, QUOTAS, ALLOCATORS, PACKERS,
    FITTERS, PRECISIONS, DECODERS, BACKENDS,
)  # fmt: skip
REGISTRIES = {registry.stage: registry for registry in _EVERY}


def strategies() -> dict[str, dict[str, str]]:
    """Every registered strategy: {stage: {name: one-line description}}."""
    stages = REGISTRIES.items()
    return {stage: {name: own.get(name).summary() for name in own} for stage, own in stages}
