"""The `numba` backend; the kernel itself is in `numba_kernel`."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gracekv.backends.attention_args import AttentionArgs
from gracekv.backends.base import BACKENDS, AttentionBackend, AttentionSpec, AttentionStep
from gracekv.backends.sdpa import Layer, Sdpa
from gracekv.backends.split_kv import SplitEntries, SplitKV
from gracekv.kernels.addresses import address
from gracekv.kernels.compiled import numba_obstacle, on_all_threads, threads_obstacle

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@BACKENDS.register("numba")
class Numba(AttentionBackend):
    """Fused kernel for CPUs: every entry read once, no padding; needs numba (gracekv[cpu]).

    Source: splitting the keys and combining by log-sum-exp is flash decoding's idea. Ours: the
    splits over ragged heads and the additive log multiplicity.

    Cost: a step reads each packed entry once, without padding; compiling takes seconds once per
    machine, and the tables held in addition to the cache are small.

    Needs: a CPU and the extra `gracekv[cpu]` (numba).

    Supports steps of one token with up to 96 queries per KV head, in float32, float16 and bfloat16,
    including quantised entries and the tail with its mask. Longer turns, more continuations,
    gradients and `torch.compile` go through `Sdpa`. Keys and values are never copied or padded.
    """

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """The reason why the kernel cannot read a layer, with a remedy, or None if it can."""
        if spec.device.type != "cpu":
            return f"The cache is on {spec.device}; the kernel is for CPUs. Use backend 'sdpa'."
        if spec.dtype is not None and spec.dtype not in _DTYPES:
            return f"It reads float32, float16 and bfloat16; got {spec.dtype}. Use backend 'sdpa'."
        if (reason := numba_obstacle()) is not None:
            return f"{reason}, or use backend 'sdpa'."
        return threads_obstacle()

    def prepare(self, layer: Layer) -> SplitEntries:
        """The layer with its splits; raises `BackendUnavailableError` if the kernel cannot run."""
        self.require(AttentionSpec.of(layer))
        return SplitEntries(layer)

    def held_bytes(self, prepared: SplitEntries) -> int:
        return prepared.held_bytes

    def warm_up(self, prepared: SplitEntries, query_heads: int) -> None:
        layer = prepared.layer
        if prepared.splits(layer.sequences, query_heads, None) is not None:
            _kernel(layer)

    def __call__(self, step: AttentionStep) -> Tensor:
        held, splits = step.packed, None
        if _suits(step, held.layer):
            splits = held.splits(len(step.query), step.query.shape[1], step.rows)
        if splits is None:
            return Sdpa()(replace(step, packed=held.views))
        return _attend(step, splits, held.layer)


def _suits(step: AttentionStep, layer: Layer) -> bool:
    """Whether the kernel supports the step: one token of plain tensors without gradients.

    The kernel reads addresses, so other inputs go to torch, which raises its own errors.
    """
    query, keys, values, sinks = step.query, step.keys, step.values, step.sink_logits
    batch, heads, tokens, dim = query.shape
    length = keys.shape[2]
    return (
        tokens == 1
        and length > 0
        and type(query) is Tensor
        and query.dtype == keys.dtype == values.dtype == layer.dtype
        and all(x.is_cpu for x in (query, keys, values))
        and keys.shape == values.shape == (batch, layer.heads, length, layer.dim)
        and heads % layer.heads == 0
        and dim == layer.dim
        and (sinks is None or (sinks.is_cpu and sinks.shape == (heads,)))
        and not (
            torch.is_grad_enabled()
            and any(x is not None and x.requires_grad for x in (query, keys, values, sinks))
        )
        and not torch.compiler.is_compiling()
    )


def _attend(step: AttentionStep, splits: SplitKV, layer: Layer) -> Tensor:
    query, keys, values = step.query, step.keys, step.values
    batch, heads, _, dim = query.shape
    length = keys.shape[2]
    # Both have the same strides, all multiples of a contiguous row of d.
    strides = keys.stride()
    alike = values.stride() == strides and strides[2:] == (dim, 1)
    if not alike or strides[0] % dim or strides[1] % dim:
        keys, values = keys.contiguous(), values.contiguous()
    mask, sinks = step.tail_bias(), step.sink_logits
    if mask is not None:
        mask = mask.expand(batch, 1, 1, length).contiguous()
    args = AttentionArgs.from_buffer_copy(splits.args)
    tail_splits = -(-length // args.longest)
    folded = query.float().contiguous()
    output = torch.empty_like(folded)
    slots = args.packed_slots + batch * heads * tail_splits
    partial = torch.empty(slots, dim + 2, dtype=torch.float32)
    counters = (ctypes.c_int64 * (1 + args.rows))()
    args.query = address("query", folded, torch.float32, *query.shape)
    args.output = address("output", output, torch.float32, *query.shape)
    args.tail_keys, args.tail_values = keys.data_ptr(), values.data_ptr()
    args.mask = 0 if mask is None else address("mask", mask, torch.float32, batch, 1, 1, length)
    args.partial = address("partial", partial, torch.float32, slots, dim + 2)
    args.counters = ctypes.addressof(counters)
    args.tail, args.tail_splits = length, tail_splits
    args.tail_batch, args.tail_head = (stride // dim for stride in keys.stride()[:2])
    args.scale, args.softcap = step.scale, step.softcap or 0.0
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
        args.sink_logits = address("sink_logits", sinks, torch.float32, heads)
    on_all_threads(_kernel(layer), ctypes.addressof(args))
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _kernel(layer: Layer) -> Any:
    from gracekv.backends.numba_kernel import attend

    return attend(layer.dtype)
