"""`GlooExchange`: how the processes of one model exchange small tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gracekv.errors import RankError

_GOES_ON, _FAILED = 0, 1


class GlooExchange:
    """Exchanges CPU tensors among the processes of one model.

    Before each tensor the processes exchange a header: whether the process continues, and the
    tensor's bytes. So if a process fails or is at another step, all of them raise an error instead
    of waiting.

    Args:
        ranks: global ranks of the processes, ascending.
        timeout: seconds to wait for a process before raising an error.
    """

    def __init__(self, ranks: list[int], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._sent: list[Any] = []
        how: Any = {"backend": "gloo", "use_local_synchronization": True}
        self._group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), **how)

    def __call__(self, tensor: Tensor) -> list[Tensor]:
        """The tensors [...] of all processes, in rank order, all of one shape and dtype.

        `tensor` is on the CPU. Raises `RankError` if a process fails, exits, times out, or passes
        another shape.
        """
        headers = self._gather(torch.tensor([_GOES_ON, tensor.nbytes]))
        if failed := [rank for rank, header in enumerate(headers) if int(header[0]) == _FAILED]:
            raise RankError(
                f"Process {', '.join(map(str, failed))} of the {len(headers)} that share this "
                f"model has failed; see its own error."
            )
        if any(int(header[1]) != tensor.nbytes for header in headers):
            raise RankError(
                "The processes that share this model are not at the same step. Make every process "
                "make the same gracekv calls in the same order."
            )
        if not tensor.nbytes:
            return [tensor] * len(headers)
        # As bytes, since gloo does not support every dtype.
        parts = self._gather(tensor.reshape(-1).view(torch.uint8))
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def fail(self) -> None:
        """Tell the others at their next exchange that this process has failed; does not wait."""
        header = torch.tensor([_FAILED, 0])
        place = [torch.empty_like(header) for _ in self._ranks]
        try:
            work = dist.all_gather(place, header, group=self._group, async_op=True)
        except RuntimeError:  # The others have exited.
            return
        # Not waited for; gloo reads and writes these tensors later.
        self._sent.append((work, header, place))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        place = [torch.empty_like(tensor) for _ in self._ranks]
        try:
            dist.all_gather(place, tensor, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"A process that shares this model has exited or did not answer within "
                f"{self._timeout:g} seconds: {error}. Restart all of them; if one is only "
                f"slow, call gracekv.distributed.connect(model, timeout=...) first."
            ) from error
        return place
