"""Log-sum-exp of rows that come in blocks of columns."""

from __future__ import annotations

import abc
import ctypes
import importlib.util

import torch
from torch import Tensor

from gracekv.kernels import omp_threads


class LogSumExp(abc.ABC):
    """The running log-sum-exp of some rows.

    Args:
        rows: how many.
        device: where their blocks lie.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.top = torch.full((rows,), -torch.inf, device=device)

    @abc.abstractmethod
    def add(self, block: Tensor) -> None:
        """Further columns, float32 [rows, any], contiguous; their memory is overwritten."""

    @abc.abstractmethod
    def result(self) -> Tensor:
        """Of all columns so far, float32 [rows]."""


class TorchLogSumExp(LogSumExp):
    """One pass over the block per operation; for any device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self._total = torch.zeros_like(self.top)

    def add(self, block: Tensor) -> None:
        peak = torch.maximum(self.top, block.amax(dim=-1))
        self._total.mul_((self.top - peak).exp_())
        # In the block's own memory: a copy of it costs more than its sums.
        self._total.add_(block.sub_(peak[:, None]).exp_().sum(dim=-1))
        self.top = peak

    def result(self) -> Tensor:
        return self._total.log().add_(self.top)


class NumbaLogSumExp(LogSumExp):
    """Each block read once, on as many threads as torch uses; for CPUs, with numba."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self._total = torch.zeros(rows, dtype=torch.float64)

    def add(self, block: Tensor) -> None:
        from gracekv.kernels.logsumexp_numba import LogSumExpArgs, accumulate

        counter = ctypes.c_int64(0)
        rows, columns = block.shape
        args = LogSumExpArgs(
            block.data_ptr(),
            self.top.data_ptr(),
            self._total.data_ptr(),
            ctypes.addressof(counter),
            rows,
            columns,
        )
        omp_threads.run(accumulate(), ctypes.addressof(args))

    def result(self) -> Tensor:
        return self._total.log_().float().add_(self.top)


def logsumexp_for(device: torch.device) -> type[LogSumExp]:
    """The fastest class for blocks on `device`."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        return NumbaLogSumExp
    return TorchLogSumExp
