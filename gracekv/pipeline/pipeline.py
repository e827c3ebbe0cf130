"""`Pipeline`: the method as a value, one strategy a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.distributed.sharding import check_works_sharded
from gracekv.pipeline.composition import Composition
from gracekv.pipeline.compression import Compression
from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill


@dataclass(frozen=True, kw_only=True)
class Pipeline(Composition):
    """Compression as a composition of strategies.

    `Pipeline.named("gracekv")` is the paper's method, `Pipeline.default` what `compress` uses.
    Change one stage with `dataclasses.replace(pipeline, floor=FLOORS.build("none"))`, or in plain
    data with `Pipeline.from_dict({"floor": "none"})`, whose other fields are the paper's. The
    constructor takes every stage by name: it has no defaults of its own.

    Attributes: see `Composition`.
    """

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

    def run(self, prefill: Prefill, budget: Budget) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack, fit, precision.

        Where slots are single tokens that stay or go, the auction is a top-k, without trees.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline.
        """
        check_works_sharded(self, prefill.shard)
        return Compression(self, self.plan(prefill, budget)).run(prefill)
