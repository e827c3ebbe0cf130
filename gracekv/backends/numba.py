"""The `numba` backend; the kernel itself is in `numba_kernel`."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from gracekv.backends.attention_args import AttentionArgs
from gracekv.backends.attention_spec import AttentionSpec
from gracekv.backends.base import BACKENDS, AttentionBackend, Partial
from gracekv.backends.coded_pieces import QuantisedWindows
from gracekv.backends.eager import additive_mask
from gracekv.backends.kv_windows import WindowedLayer
from gracekv.backends.sdpa import Sdpa
from gracekv.backends.split_kv import Layer, SplitKV, SplitLayer
from gracekv.kernels import omp_threads

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class NumbaLayer:
    """A layer for both ways of reading it.

    Attributes:
        splits: for the compiled kernel.
        windows: for everything else; holds nothing until then.
    """

    splits: SplitLayer
    windows: WindowedLayer | QuantisedWindows


@final
@BACKENDS.register("numba")
@dataclass(frozen=True, slots=False)
class Numba(AttentionBackend):
    """Fused kernel for CPUs: every entry read once, no padding; needs numba (gracekv[cpu]).

    Source: splitting the keys and combining by log-sum-exp is flash decoding's idea. Ours: the
    splits over ragged heads and the additive log multiplicity.

    Cost: a step reads each packed entry once, without padding; compiling takes seconds once on a
    machine, and the tables held beside the cache are small.

    Needs: a CPU and the extra `gracekv[cpu]` (numba).

    Takes steps of one token with up to 96 queries a KV head, in float32, float16 and bfloat16,
    quantised entries and the tail with its mask included. Longer turns, more continuations,
    gradients and `torch.compile` go through `Sdpa`. Keys and values are never copied or padded.
    """

    reads_codes: ClassVar[bool] = True
    takes_softcap: ClassVar[bool] = True
    takes_sink_logits: ClassVar[bool] = True

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """Why the kernel cannot run there and what to do about it; None if it can."""
        reason = super().obstacle(spec)
        if reason is not None:
            return reason
        if spec.device.type != "cpu":
            return f"The cache lies on {spec.device}; the kernel is for CPUs. Use backend 'sdpa'."
        if spec.dtype is not None and spec.dtype not in _DTYPES:
            return (
                f"The kernel reads float32, float16 and bfloat16; got {spec.dtype}. "
                f"Use backend 'sdpa'."
            )
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed. Run: pip install 'gracekv[cpu]', or use backend 'sdpa'."
        return omp_threads.obstacle()

    def prepare(self, layer: Layer) -> NumbaLayer:
        """The layer; `BackendUnavailableError` where the kernel cannot run, saying why."""
        self.require(AttentionSpec.of(layer))
        return NumbaLayer(SplitLayer(layer), Sdpa().prepare(layer))

    def held_bytes(self, prepared: NumbaLayer) -> int:
        return prepared.splits.held_bytes + prepared.windows.held_bytes

    def warm_up(self, prepared: NumbaLayer, query_heads: int) -> None:
        layer = prepared.splits.layer
        if prepared.splits.splits(layer.sequences, query_heads, None) is None:
            Sdpa().warm_up(prepared.windows, query_heads)
        else:
            _kernel(layer)

    def packed(
        self,
        query: Tensor,
        prepared: NumbaLayer,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
    ) -> Partial:
        return Sdpa().packed(query, prepared.windows, scale, rows, softcap=softcap)

    def tail(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        softcap: float | None = None,
    ) -> Partial:
        return Sdpa().tail(query, keys, values, mask, scale, softcap=softcap)

    def __call__(
        self,
        query: Tensor,
        prepared: NumbaLayer,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        splits = None
        if _suits(query, prepared.splits.layer, keys, values, sink_logits):
            splits = prepared.splits.splits(query.shape[0], query.shape[1], rows)
        if splits is None:
            return Sdpa()(
                query, prepared.windows, keys, values, mask, scale, rows,
                softcap=softcap, sink_logits=sink_logits,
            )  # fmt: skip
        return _attend(
            splits, prepared.splits.layer, query, keys, values, mask, scale, softcap, sink_logits
        )


def _suits(
    query: Tensor, layer: Layer, keys: Tensor, values: Tensor, sink_logits: Tensor | None
) -> bool:
    """Whether the kernel can take the step: one token of plain tensors without gradients.

    The kernel reads addresses, so inputs that do not fit go to torch, which raises its own errors.
    """
    batch, heads, tokens, dim = query.shape
    length = keys.shape[2]
    return (
        tokens == 1
        and length > 0
        and type(query) is Tensor
        and query.dtype == keys.dtype == values.dtype == layer.dtype
        and query.is_cpu
        and keys.is_cpu
        and values.is_cpu
        and keys.shape == values.shape == (batch, layer.heads, length, layer.dim)
        and heads % layer.heads == 0
        and dim == layer.dim
        and (sink_logits is None or (sink_logits.is_cpu and sink_logits.shape == (heads,)))
        and not (
            torch.is_grad_enabled()
            and any(x is not None and x.requires_grad for x in (query, keys, values, sink_logits))
        )
        and not torch.compiler.is_compiling()
    )


def _attend(
    splits: SplitKV,
    layer: Layer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    batch, heads, _, dim = query.shape
    length = keys.shape[2]
    if not _same_row_layout(keys, values):
        keys, values = keys.contiguous(), values.contiguous()
    if mask is not None:
        mask = additive_mask(mask, 1, length, query.device).expand(batch, 1, 1, length)
        mask = mask.contiguous()
    tail_splits = -(-length // splits.longest)
    folded = query.float().contiguous()
    output = torch.empty_like(folded)
    partial = torch.empty(splits.slots + batch * heads * tail_splits, dim + 2)
    counters = (ctypes.c_int64 * (1 + len(splits.row_splits)))()
    args = AttentionArgs.from_buffer_copy(splits.args)
    args.query, args.output = folded.data_ptr(), output.data_ptr()
    args.tail_keys, args.tail_values = keys.data_ptr(), values.data_ptr()
    args.mask = 0 if mask is None else mask.data_ptr()
    args.partial, args.counters = partial.data_ptr(), ctypes.addressof(counters)
    args.tail, args.tail_splits = length, tail_splits
    args.tail_batch, args.tail_head = (stride // dim for stride in keys.stride()[:2])
    args.scale, args.softcap = scale, softcap or 0.0
    if sink_logits is not None:
        sink_logits = sink_logits.detach().float().contiguous()
        args.sink_logits = sink_logits.data_ptr()
    omp_threads.run(_kernel(layer), ctypes.addressof(args))
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _same_row_layout(keys: Tensor, values: Tensor) -> bool:
    """Whether both have the same strides, all of them multiples of a contiguous row of d."""
    batch, head, token, number = keys.stride()
    dim = keys.shape[3]
    return (
        values.stride() == keys.stride()
        and (token, number) == (dim, 1)
        and batch % dim == head % dim == 0
    )


def _kernel(layer: Layer) -> Any:
    from gracekv.backends.numba_kernel import attend

    return attend(layer.dtype)
