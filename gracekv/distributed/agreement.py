"""Calls that every process of a sharded model makes together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gracekv.distributed.sharding import HeadShard, head_shard
from gracekv.errors import RankError


def in_step(model: Any) -> AbstractContextManager[HeadShard]:
    """A block that all processes of a sharded `model` run together; yields its `head_shard`.

    If the block fails on one process, the others raise `RankError` at their next exchange.
    """
    return together(head_shard(model))


@contextmanager
def together(shard: HeadShard) -> Iterator[HeadShard]:
    """`in_step` of the processes that `shard` reaches."""
    try:
        yield shard
    except RankError:
        raise
    except Exception:
        if shard.exchange is not None:
            shard.exchange.fail()
        raise


def call_facts(
    prompts: Sequence[Any], pipeline: object, budget: object, **others: object
) -> dict[str, bytes]:
    """What all processes must have in common in one call, for `HeadShard.agree`.

    Args:
        prompts: each with `ids` and `spans`.
        pipeline: the pipeline that compresses them.
        budget: the budget of each prompt.
        others: further arguments, by the name that an error gives them.
    """
    return {
        "prompt": b"".join(repr((x.ids.tolist(), x.spans)).encode() for x in prompts),
        "pipeline": repr(pipeline).encode(),
        "budget": repr(budget).encode(),
        **{name: repr(value).encode() for name, value in others.items()},
    }
