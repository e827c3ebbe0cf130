"""Samples over a Ray cluster: each worker loads the model once and takes sample after sample.

Rows come back to the caller, which alone writes them; the workers need no common disk, only the
model and the data under the same names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gracekv.errors import MissingDependencyError
from gracekv.evaluate.experiment import Experiment, PendingSample
from gracekv.evaluate.row_files import Row
from gracekv.registry.plugins import import_modules, imported_modules


class RemoteWorker:
    """The actor: a `Worker` made on its own machine.

    Args:
        name: of the model.
        dtype: of its weights.
        data: folder of texts, or None.
        imports: modules that register the strategies in the pipelines of pending samples.
    """

    def __init__(self, name: str, dtype: str, data: str | None, imports: Sequence[str]) -> None:
        from gracekv.evaluate.sources import Sources
        from gracekv.evaluate.worker import Worker
        from gracekv.hf.loading import load_model

        import_modules(imports)
        sources = Sources(None if data is None else Path(data))
        self.worker = Worker(name, dtype, *load_model(name, dtype), sources)

    def rows(self, sample: PendingSample) -> list[Row]:
        """All rows of one sample."""
        return list(self.worker.rows(sample))


def spread(experiment: Experiment, samples: Sequence[PendingSample], workers: int) -> Iterator[Row]:
    """Rows of all samples as they are finished, in any order.

    Joins the cluster that RAY_ADDRESS names, or starts one on this machine. A worker that dies is
    started again and its sample run once more. Raises `MissingDependencyError` without Ray.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            "Spreading samples over a cluster needs the package 'ray'. Install it with: "
            "pip install 'gracekv[ray]'"
        )
    # Ray is loosely typed and optional: to the type checker it is anything.
    ray: Any = importlib.import_module("ray")
    pools: Any = importlib.import_module("ray.util")

    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=1)(
            RemoteWorker
        )
        count = min(workers, len(samples))
        made_of = (experiment.model, experiment.dtype, experiment.data, imported_modules())
        actors = [remote.remote(*made_of) for _ in range(count)]
        pool = pools.ActorPool(actors)
        for rows in pool.map_unordered(lambda actor, sample: actor.rows.remote(sample), samples):
            yield from rows
    finally:
        if started:
            ray.shutdown()
