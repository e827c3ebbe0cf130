"""Sums and maxima over queries of attention probabilities, for every key.

Three implementations: torch (any device; the fallback and the others' reference),
`softmax_sums_numba` (CPUs) and `softmax_sums_triton` (NVIDIA GPUs).

Source: ours.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch
from torch import Tensor

from gracekv.errors import BackendUnavailableError
from gracekv.kernels import device as triton_device
from gracekv.kernels.compiled import numba_obstacle
from gracekv.kernels.linalg import Columns, capped, linear, softmax
from gracekv.kernels.uploads import filled, on_device

Engine = Literal["auto", "torch", "numba", "triton"]

# Bytes of logits that torch holds at once: about a CPU's cache; on a GPU, enough work per launch.
# Very long prompts exceed this, because a product needs a minimum number of rows to be fast.
_CPU_BLOCK, _GPU_BLOCK, _LEAST_ROWS = 4 * 2**20, 256 * 2**20, 16
# Dtypes of the compiled engines, and the largest head dimension of the engine `triton`.
_COMPILED, _LARGEST_DIM = (torch.float32, torch.bfloat16, torch.float16), 256


def softmax_columns(
    queries: Tensor,
    keys: Tensor,
    seen: Tensor | int,
    weights: Tensor | None = None,
    *,
    scale: float = 1.0,
    power: float = 1.0,
    maximum: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    engine: Engine = "auto",
) -> Tensor:
    """sum_q w_q p_{q,t}^power for every key t, or the maximum over q: float32 [H, T].

    p_q is the softmax of a query's logits over the first `seen` keys, and 0 after them. Logits are
    computed in float32.

    Args:
        queries: [H, Q, d]; H a multiple of G.
        keys: [G, T, d] of any floating dtype.
        seen: int64 [Q], the number of keys that each query sees, from 1 to T, in any order
            (ascending is fastest), or a single number for all queries.
        weights: w [Q], or None for equal weights of 1.
        scale: factor of q . k, above 0.
        power: exponent, at least 1.
        maximum: reduce w_q p^power over queries with the maximum instead of the sum.
        softcap: logit softcap, or None.
        sinks: [H] or [H, Q], logits of attention sinks per query head or per query, or None.
        engine: "auto" chooses the fastest for these tensors; only "torch" supports a softcap.

    Raises `BackendUnavailableError` for another engine with a softcap.
    """
    count, device = queries.shape[1], keys.device
    if not count:
        return queries.new_zeros(queries.shape[0], keys.shape[1], dtype=torch.float32)
    if isinstance(seen, int):
        seen = filled(count, seen, torch.int64, device)
    if weights is None:
        weights = filled(count, 1.0, torch.float32, device)
    if sinks is not None:
        each = sinks[:, None] if sinks.ndim == 1 else sinks
        sinks = each.to(device, torch.float32).expand(len(queries), count)
    if engine == "auto":
        engine = _fastest(queries, keys) if softcap is None else "torch"
    seen = on_device(seen.long(), device)
    weights = on_device(weights.float(), device)
    asked = Columns(queries, keys, seen, weights, scale, power, maximum, sinks)
    if engine == "torch":
        return _torch_columns(asked, softcap)
    if softcap is not None:
        raise BackendUnavailableError(
            f"Engine {engine!r} does not support a logit softcap. Use engine 'torch'."
        )
    compiled = importlib.import_module(f"gracekv.kernels.softmax_sums_{engine}")
    columns: Tensor = compiled.softmax_columns(asked)
    return columns


def _fastest(queries: Tensor, keys: Tensor) -> Engine:
    if not type(queries) is type(keys) is Tensor or keys.dtype not in _COMPILED:
        return "torch"
    if keys.device.type == "cpu":
        return "numba" if numba_obstacle() is None else "torch"
    fits = keys.shape[-1] <= _LARGEST_DIM
    return "triton" if fits and triton_device.obstacle(keys.device, "torch") is None else "torch"


def _torch_columns(asked: Columns, softcap: float | None) -> Tensor:
    """Work in blocks of queries; a block reads the keys up to the last one that it sees."""
    queries, keys, seen, sinks = asked.scaled, asked.keys, asked.seen, asked.sinks
    heads, count, dim = queries.shape
    groups, length, _ = keys.shape
    shared, wide = queries.unflatten(0, (groups, -1)), keys.float()
    total = queries.new_zeros(groups, heads // groups, length)
    own = None if sinks is None else sinks.reshape(groups, heads // groups, count, 1)
    is_cpu = keys.device.type == "cpu"
    row_bytes = 4 * (heads // groups) * length
    block = max(_LEAST_ROWS, (_CPU_BLOCK if is_cpu else _GPU_BLOCK) // row_bytes)
    for first in range(0, count, block):
        rows = slice(first, first + block)
        visible = seen[rows]
        # The bounds would synchronise with a GPU.
        before, stop = (int(visible.min()), int(visible.max())) if is_cpu else (0, length)
        hidden = torch.arange(before, stop, device=keys.device) >= visible[:, None]
        # One head at a time, so its logits are still in the CPU's cache when they are read.
        for head in range(groups):
            some = shared[head, :, rows].reshape(-1, dim)
            logits = linear(some, wide[head, :stop]).view(-1, len(visible), stop)
            logits = capped(logits, softcap)
            logits[..., before:].masked_fill_(hidden, -torch.inf)
            shares = softmax(logits, None if own is None else own[head, :, rows])
            if asked.power != 1.0:
                shares.pow_(asked.power)
            here = total[head, :, :stop]
            if asked.maximum:
                torch.maximum(here, (shares * asked.weights[rows, None]).amax(dim=1), out=here)
            else:
                here += asked.weights[rows] @ shares
    return total.flatten(0, 1)
