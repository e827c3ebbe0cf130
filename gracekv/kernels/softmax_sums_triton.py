"""Column sums and maxima of softmax rows on NVIDIA GPUs; logits are never written to memory.

Two kernels compute the logits: the first keeps a log-sum-exp per query, the second reduces
probabilities over queries for a block of keys. Half-precision keys are multiplied on tensor cores
with float32 sums; queries, which are float32, are split into two parts of the keys' dtype. Float32
keys are multiplied in full float32. There are no atomic operations: results are the same to the bit
from run to run.

Source: ours; the two passes are those of flash attention's backward pass (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.device import interpreted
from gracekv.kernels.softmax_sums_triton_kernel import reduce_columns, row_logsumexp

LARGEST_DIM = 256
# Queries of one program of the second kernel.
_QUERIES = 256
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_sizes(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants and launch options of both kernels: 64 x 64 logits, features in blocks."""
    if dtype == torch.float32:
        return {"BLOCK_Q": 32, "BLOCK_K": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 1}
    features = min(64, max(16, 1 << (dim - 1).bit_length()))
    return {"BLOCK_Q": 64, "BLOCK_K": 64, "BLOCK_D": features, "num_warps": 4, "num_stages": 2}


def takes(queries: Tensor, keys: Tensor) -> bool:
    """Whether the kernels can read queries [H, Q, d] and keys [G, T, d]."""
    plain = type(queries) is type(keys) is Tensor
    return plain and keys.dtype in _DTYPES and keys.shape[-1] <= LARGEST_DIM


def split(queries: Tensor, dtype: torch.dtype) -> Tensor:
    """[PARTS, ...] in `dtype` whose parts add up to float32 `queries`, two if it is a half."""
    if dtype == torch.float32:
        return queries[None]
    high = queries.to(dtype)
    return torch.stack([high, (queries - high.float()).to(dtype)])


def softmax_columns(
    queries: Tensor,
    keys: Tensor,
    seen: Tensor,
    weights: Tensor,
    sinks: Tensor,
    power: float,
    maximum: bool,
) -> Tensor:
    """float32 [H, T]; as in `gracekv.kernels.softmax_sums`, on a GPU, with sinks [H, Q]."""
    heads, count, dim = queries.shape
    groups, length, _ = keys.shape
    parts = split(queries * _LOG2_E, keys.dtype).contiguous()
    keys, seen, weights = keys.contiguous(), seen.contiguous(), weights.contiguous()
    sinks = (sinks * _LOG2_E).contiguous()
    lse = torch.empty(heads, count, device=keys.device)
    chunks = -(-count // _QUERIES)
    output = torch.empty(chunks, heads, length, device=keys.device)
    sizes = block_sizes(dim, keys.dtype)
    constants = {"GROUP": heads // groups, "D": dim, "PARTS": len(parts), "UPCAST": interpreted()}
    numbers = {"count": count, "length": length, "features": dim}
    with torch.cuda.device_of(keys):
        row_logsumexp[(-(-count // sizes["BLOCK_Q"]), heads)](
            parts, keys, seen, sinks, lse, **numbers, **constants, **sizes, enable_fp_fusion=True
        )
        reduce_columns[(-(-length // sizes["BLOCK_K"]), heads, chunks)](
            parts,
            keys,
            seen,
            lse,
            weights,
            output,
            **numbers,
            chunk=_QUERIES,
            power=float(power),
            MAXIMUM=maximum,
            **constants,
            **sizes,
            enable_fp_fusion=True,
        )
    return output.amax(dim=0) if maximum else output.sum(dim=0)
