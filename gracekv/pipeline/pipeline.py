"""`Pipeline`: the method as a value, one strategy a stage."""

from __future__ import annotations

from dataclasses import dataclass

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

    def run(self, prefill: Prefill, budget: Budget) -> Run:
        """Compress one prefill: segment, value, tree, allocate, pack, fit, precision.

        Where slots are single tokens that stay or go, the auction is a top-k, without trees.

        Raises `BudgetError` if the budget is too small, `MissingCaptureError` if the prefill was
        captured for another pipeline.
        """
        plan = self.plan(prefill, budget)
        check_works_sharded(self, prefill.shard)
        return Compression(self, plan).run(prefill)
