"""The `numba` backend; the kernel itself is in `gracekv.kernels.attention_cpu`."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, Backend, Partial
from gracekv.backends.eager import additive_mask
from gracekv.backends.kv_windows import Windows
from gracekv.backends.sdpa import Sdpa
from gracekv.backends.split_kv import Plan, Plans
from gracekv.cache.base import RaggedLayer
from gracekv.errors import BackendUnavailableError
from gracekv.kernels import omp_threads

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A layer for both ways of reading it.

    Attributes:
        plans: pieces for the compiled kernel.
        windows: for everything else; holds nothing until then.
    """

    plans: Plans
    windows: Windows


@final
@BACKENDS.register("numba")
@dataclass(frozen=True, slots=False)
class Numba(Backend):
    """Fused kernel for CPUs: every entry read once, no padding; needs numba (gracekv[cpu]).

    Source: splitting the keys and combining by log-sum-exp is flash decoding's idea. Ours: the
    pieces over ragged heads and the additive log multiplicity.

    Cost: a step reads each packed entry once, without padding; compiling takes seconds once on a
    machine, and the pieces held beside the cache are small.

    Needs: a CPU and the extra `gracekv[cpu]` (numba).

    Takes steps of one token with up to 96 queries a KV head, in float32, float16 and bfloat16,
    the tail with its mask included. Longer turns, more continuations, gradients and
    `torch.compile` go through `Sdpa`. Keys and values are never copied or padded.
    """

    def obstacle(
        self, device: torch.device, dtype: torch.dtype | None = None, dim: int | None = None
    ) -> str | None:
        """Why the kernel cannot run there and what to do about it; None if it can."""
        if device.type != "cpu":
            return f"The cache lies on {device}; the kernel is for CPUs. Use backend 'sdpa'."
        if dtype is not None and dtype not in _DTYPES:
            return (
                f"The kernel reads float32, float16 and bfloat16; got {dtype}. Use backend 'sdpa'."
            )
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed. Run: pip install 'gracekv[cpu]', or use backend 'sdpa'."
        return omp_threads.obstacle()

    def prepare(self, layer: RaggedLayer) -> Prepared:
        """The layer; `BackendUnavailableError` where the kernel cannot run, saying why."""
        found = self.obstacle(layer.keys.device, layer.keys.dtype)
        if found is not None:
            raise BackendUnavailableError(f"Backend 'numba' cannot run here. {found}")
        return Prepared(Plans(layer), Windows(layer))

    def held_bytes(self, prepared: Prepared) -> int:
        return prepared.plans.held_bytes + prepared.windows.held_bytes

    def warm(self, prepared: Prepared, query_heads: int) -> None:
        layer = prepared.plans.layer
        if prepared.plans.plan(layer.sequences, query_heads, None) is None:
            Sdpa().warm(prepared.windows, query_heads)
        else:
            _kernel(layer.keys.dtype)

    def packed(
        self, query: Tensor, prepared: Prepared, scale: float, rows: Tensor | None = None
    ) -> Partial:
        return Sdpa().packed(query, prepared.windows, scale, rows)

    def tail(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Partial:
        return Sdpa().tail(query, keys, values, mask, scale)

    def __call__(
        self,
        query: Tensor,
        prepared: Prepared,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        plan = None
        if _suits(query, prepared.plans.layer, keys, values):
            plan = prepared.plans.plan(query.shape[0], query.shape[1], rows)
        if plan is None:
            return Sdpa()(query, prepared.windows, keys, values, mask, scale, rows)
        return _attend(plan, prepared.plans.layer, query, keys, values, mask, scale)


def _suits(query: Tensor, layer: RaggedLayer, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel can take the step: one token of plain tensors, nothing to record.

    The kernel reads addresses, so whatever does not fit is left to torch, which says what is wrong.
    """
    batch, heads, tokens, dim = query.shape
    length = keys.shape[2]
    return (
        tokens == 1
        and length > 0
        and type(query) is Tensor
        and query.dtype == keys.dtype == values.dtype == layer.keys.dtype
        and query.is_cpu
        and keys.is_cpu
        and values.is_cpu
        and keys.shape == values.shape == (batch, layer.heads, length, layer.keys.shape[1])
        and heads % layer.heads == 0
        and dim == layer.keys.shape[1]
        and not (
            torch.is_grad_enabled()
            and (query.requires_grad or keys.requires_grad or values.requires_grad)
        )
        and not torch.compiler.is_compiling()
    )


def _attend(
    plan: Plan,
    layer: RaggedLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    from gracekv.kernels.attention_cpu import Task

    batch, heads, _, dim = query.shape
    length = keys.shape[2]
    if not _rows_are_whole(keys, values):
        keys, values = keys.contiguous(), values.contiguous()
    if mask is not None:
        mask = additive_mask(mask, 1, length, query.device).expand(batch, 1, 1, length)
        mask = mask.contiguous()
    tail_pieces = -(-length // plan.longest)
    folded = query.float().contiguous()
    output = torch.empty_like(folded)
    partial = torch.empty(plan.slots + batch * heads * tail_pieces, dim + 2)
    counters = (ctypes.c_int64 * (1 + len(layer.offsets)))()
    task = Task.from_buffer_copy(plan.task)
    task.query, task.output = folded.data_ptr(), output.data_ptr()
    task.tail_keys, task.tail_values = keys.data_ptr(), values.data_ptr()
    task.mask = 0 if mask is None else mask.data_ptr()
    task.partial, task.counters = partial.data_ptr(), ctypes.addressof(counters)
    task.tail, task.tail_pieces = length, tail_pieces
    task.tail_batch, task.tail_head = (stride // dim for stride in keys.stride()[:2])
    task.scale = scale
    omp_threads.run(_kernel(query.dtype), ctypes.addressof(task))
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _rows_are_whole(keys: Tensor, values: Tensor) -> bool:
    """Whether both lie alike, and every row of d numbers is a whole number of rows further."""
    batch, head, token, number = keys.stride()
    dim = keys.shape[3]
    return (
        values.stride() == keys.stride()
        and (token, number) == (dim, 1)
        and batch % dim == head % dim == 0
    )


def _kernel(dtype: torch.dtype) -> Any:
    from gracekv.kernels.attention_cpu import attend

    return attend(dtype)
