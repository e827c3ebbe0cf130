"""Which pipelines work where attention heads are spread over processes."""

from __future__ import annotations

from gracekv.distributed.head_shard import HeadShard
from gracekv.errors import ConfigError
from gracekv.registry import Configurable, Strategy
from gracekv.registry.hyperparameter import parts_of


def check_works_sharded(pipeline: Configurable, shard: HeadShard | None) -> None:
    """Raise `ConfigError` if a strategy of `pipeline` needs all heads, and `shard` holds some."""
    if shard is None:
        return
    names = [
        f"{x.registry.stage} {x.name!r}"
        for x in parts_of(pipeline)
        if isinstance(x, Strategy) and not x.works_sharded
    ]
    if getattr(pipeline, "certify", False):
        names.append("certify=True")
    if names:
        raise ConfigError(
            f"This model's attention heads are spread over processes, and {', '.join(names)} would "
            f"need all of them in one. Take a recipe that works on such models, among them "
            f"'gracekv-plus', 'gracekv-agnostic', 'gracekv' and 'snapkv', or load the model with "
            f"device_map in one process."
        )
