"""Calls that every process of a sharded model makes together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gracekv.distributed.head_shard import HeadShard
from gracekv.distributed.sharding import head_shard
from gracekv.errors import RankError


@contextmanager
def in_step(model: Any) -> Iterator[HeadShard | None]:
    """A block that all processes of a sharded `model` run together; yields its `head_shard`.

    If the block fails on one process, the others raise `RankError` at their next exchange.
    """
    shard = head_shard(model)
    if shard is None:
        yield None
        return
    try:
        yield shard
    except RankError:
        raise
    except Exception:
        shard.exchange.fail()
        raise
