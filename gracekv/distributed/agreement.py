"""Calls that all processes of a sharded model make together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gracekv.distributed.sharding import HeadShard, head_shard
from gracekv.errors import RankError


def in_step(model: Any) -> AbstractContextManager[HeadShard]:
    """A block that all processes of a sharded `model` run together; yields its `head_shard`.

    If the block fails on one process, the others raise `RankError` at their next exchange. In the
    block, new tensors are on the CPU by default.
    """
    return together(head_shard(model))


@contextmanager
def together(shard: HeadShard) -> Iterator[HeadShard]:
    """`in_step` for the processes of `shard`."""
    try:
        # Overrides torch.set_default_device; a mode that changes nothing would cost time.
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield shard
    except RankError:
        raise
    except Exception:
        if shard.exchange is not None:
            shard.exchange.fail()
        raise
