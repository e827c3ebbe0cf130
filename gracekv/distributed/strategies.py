"""Which pipelines work where attention heads are spread over processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gracekv.distributed.head_shard import HeadShard
from gracekv.errors import ConfigError
from gracekv.registry import Configurable, Strategy


def check_works_sharded(pipeline: Configurable, shard: HeadShard | None) -> None:
    """Raise `ConfigError` if a strategy of `pipeline` needs all heads, and `shard` holds some."""
    if shard is None:
        return
    names = [f"{x.registry.stage} {x.name!r}" for x in _strategies(pipeline) if not x.works_sharded]
    if getattr(pipeline, "certify", False):
        names.append("certify=True")
    if names:
        raise ConfigError(
            f"This model's attention heads are spread over processes, and {', '.join(names)} would "
            f"need all of them in one. Take a recipe that works on such models, among them "
            f"'gracekv-plus', 'gracekv-agnostic', 'gracekv' and 'snapkv', or load the model with "
            f"device_map in one process."
        )


def _strategies(value: object) -> Iterator[Strategy]:
    """Every strategy in `value`, itself included."""
    if isinstance(value, Strategy):
        yield value
    if isinstance(value, Configurable):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from _strategies(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _strategies(item)
