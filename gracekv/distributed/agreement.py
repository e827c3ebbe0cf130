"""Calls that every process of a sharded model makes together, and the process group they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gracekv.distributed.sharding import HeadShard, head_shard
from gracekv.errors import RankError


def in_step(model: Any) -> AbstractContextManager[HeadShard]:
    """A block that all processes of a sharded `model` run together; yields its `head_shard`.

    If the block fails on one process, the others raise `RankError` at their next exchange. Inside,
    new tensors lie on the CPU unless told otherwise.
    """
    return together(head_shard(model))


@contextmanager
def together(shard: HeadShard) -> Iterator[HeadShard]:
    """`in_step` of the processes that `shard` reaches."""
    try:
        # Whatever torch.set_default_device says; a mode that changes nothing would cost time.
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
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
    """Arguments that all processes must have in common, for `HeadShard.agree`.

    Args:
        prompts: each with `ids` and `spans`.
        pipeline: the pipeline that compresses them, or None.
        budget: the budget of each prompt, or None.
        others: further arguments, by the name that an error gives them.
    """
    return {
        "prompt": b"".join(repr((x.ids.tolist(), x.spans)).encode() for x in prompts),
        "pipeline": repr(pipeline).encode(),
        "budget": repr(budget).encode(),
        **{name: repr(value).encode() for name, value in others.items()},
    }


_GOES_ON, _FAILED = 0, 1


class GlooExchange:
    """Exchanges CPU tensors among the processes of one model.

    Before each tensor a header goes round: whether the process goes on, and the tensor's bytes. So
    a process that fails, or is at another step, is an error on all of them and no wait.

    Args:
        ranks: global ranks of the processes, ascending.
        timeout: seconds after which a process that does not answer is an error.
    """

    def __init__(self, ranks: list[int], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._sent: list[Any] = []
        how: Any = {"backend": "gloo", "use_local_synchronization": True}
        self._group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), **how)

    def __call__(self, tensor: Tensor) -> list[Tensor]:
        """The tensors [...] of all processes, in rank order; see `Exchange`.

        Raises `RankError` if a process fails, leaves, is too late, or gives another shape.
        """
        headers = self._gather(torch.tensor([_GOES_ON, tensor.nbytes]))
        if failed := [rank for rank, header in enumerate(headers) if int(header[0]) == _FAILED]:
            raise RankError(
                f"Process {', '.join(map(str, failed))} of the {len(headers)} that share this "
                f"model has failed; its own error says why."
            )
        if any(int(header[1]) != tensor.nbytes for header in headers):
            raise RankError(
                "The processes that share this model are not at the same step. Let every process "
                "make the same calls of gracekv, in the same order."
            )
        if not tensor.nbytes:
            return [tensor] * len(headers)
        # Bytes, since gloo does not know every dtype.
        parts = self._gather(tensor.reshape(-1).view(torch.uint8))
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def fail(self) -> None:
        """Tell the others, at their next exchange, that this process has failed; does not wait."""
        header = torch.tensor([_FAILED, 0])
        place = [torch.empty_like(header) for _ in self._ranks]
        try:
            work = dist.all_gather(place, header, group=self._group, async_op=True)
        except RuntimeError:  # The others are gone.
            return
        # Not waited for; gloo reads and writes these tensors later.
        self._sent.append((work, header, place))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        place = [torch.empty_like(tensor) for _ in self._ranks]
        try:
            dist.all_gather(place, tensor, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"A process that shares this model has ended, or did not answer within "
                f"{self._timeout:g} seconds: {error}. Start all of them again; if one is only "
                f"slow, call gracekv.distributed.connect(model, timeout=...) first."
            ) from error
        return place
