"""Attention of some of a prompt's tokens to captured keys and values, and their rotations.

The chunked prefill, passes over further tokens and the second pass for missing queries all run some
tokens through the model while the keys and values of all tokens are stored together.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as kernels
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from gracekv.errors import SlowAttentionWarning
from gracekv.kernels.device import capability
from gracekv.prefill.attention_patch import AttentionCall, own_thread
from gracekv.prefill.model_layers import rotary_module
from gracekv.prefill.spans import first_entries
from gracekv.undo import replaced_forward

# Elements of the mask of a second pass, read by every layer, and its fewest and most tokens.
_MASK, _LEAST, _MOST = 2**25, 128, 1024
# Maximum rows that attend at once on a CPU, and elements of their mask, small compared with keys.
_ROWS, _ROW_MASK = 256, 2**22
# The fewest tokens for which cuDNN is used: it plans each new length, which may cost more than it
# gains for fewer tokens (ours).
_LEAST_SPLIT = 4096


def chunk_length(length: int) -> int:
    """Number of tokens that run at once against `length` keys: a mask of at most 2^25 elements."""
    return max(_LEAST, min(_MOST, _MASK // max(1, length)))


class CausalMasks:
    """Additive masks of consecutive tokens, as views of one tensor.

    Args:
        base: the model's stock attention implementation, "sdpa" or "eager".
        length: T, tokens of the prompt.
    """

    def __init__(self, base: str, length: int) -> None:
        self._base, self._length = base, length
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, query: Tensor, first: int) -> Tensor:
        """[1, 1, n, first + n] in the dtype of query [1, H, n, d], for positions `first` and up."""
        key, rows = (query.device, query.dtype), query.shape[2]
        if key not in self._made or len(self._made[key]) < rows:
            place = torch.arange(rows + self._length, device=query.device) - self._length
            later = place > torch.arange(rows, device=query.device)[:, None]
            self._made[key] = additive(later, query, self._base)
        start = self._length - first
        return self._made[key][None, None, :rows, start : start + first + rows]


def additive(hidden: Tensor, query: Tensor, base: str) -> Tensor:
    """A mask [Q, S] in the dtype of `query`: 0, or the lowest number where `hidden` is set."""
    # Eager attention adds the mask before a softmax, whose rows must not be all -inf.
    lowest = torch.finfo(query.dtype).min if base == "eager" else -torch.inf
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, lowest)


class PartialAttention:
    """Attention of tokens at some positions, each to the keys up to its own position.

    On a GPU, consecutive tokens attend in one call without a mask: FlashAttention in 16 bits, else
    the memory-efficient kernel. Everything else attends in blocks of rows with a mask.

    Args:
        base: the model's stock attention implementation, "sdpa" or "eager".
        positions: int64 [C] ascending, absolute, on the CPU.
        masks: makes the masks if the positions are consecutive, else None.
        past: number of places of a preceding `Past`; on CPUs each head reads only its own entries.
    """

    def __init__(
        self, base: str, positions: Tensor, masks: CausalMasks | None = None, past: int = 0
    ) -> None:
        self._base, self._positions, self._masks = base, positions, masks
        self._past = past
        self._made: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def __call__(
        self, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, None]:
        """The result of the model's attention function for query [1, H, C, d].

        `keys` and `values` are [G, T, d] at least up to the last position. All three may have more
        columns than those of `call`, whose width the result has.
        """
        output = self._output(call, query, keys, values)
        return output[..., : call.query.shape[-1]].contiguous(), None

    def _output(self, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[1, C, H, d]."""
        # On AMD GPUs the mask of fewer queries than keys begins at the other end.
        cuda = query.device.type == "cuda" and torch.version.hip is None
        if cuda and self._masks is not None and self._base == "sdpa":
            stop = int(self._positions[-1]) + 1
            output = causal_attention(query, keys[:, :stop], values[:, :stop], call.scale)
            if output is not None:
                return output
        starts = first_entries(keys, self._past)
        # Eager attention takes all heads at once, since it may have one sink per head.
        if self._base == "eager" or not any(starts):
            return self._masked(call, query, keys, values)
        queries = query.split(query.shape[1] // len(keys), dim=1)
        heads = zip(queries, keys.split(1), values.split(1), starts, strict=True)
        return torch.cat([self._masked(call, *own) for own in heads], dim=2)

    def _masked(
        self, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, start: int = 0
    ) -> Tensor:
        """[1, C, H, d]: the heads' attention to the keys from `start` on, in blocks of rows."""
        size = chunk_length(keys.shape[1])
        if query.device.type == "cpu":
            size = max(32, min(_ROWS, _ROW_MASK // max(1, keys.shape[1])))
        outputs = []
        firsts = range(0, len(self._positions), size)
        for first, rows in zip(firsts, query.split(size, dim=2), strict=True):
            stop = int(self._positions[first + rows.shape[2] - 1]) + 1
            mask = self._mask(rows, first, stop)
            mask = None if mask is None else mask[..., start:]
            own_keys, own_values = keys[:, start:stop], values[:, start:stop]
            if self._base == "eager":
                outputs.append(call.output(rows, own_keys[None], own_values[None], mask)[0])
            else:
                outputs.append(_grouped_attention(rows, own_keys, own_values, mask, call.scale))
        return torch.cat(outputs, dim=1)

    def _mask(self, rows: Tensor, first: int, stop: int) -> Tensor | None:
        """Additive mask [1, 1, n, stop] of the rows [1, H, n, d] from `first` on.

        None for a single row, which sees every key up to `stop`.
        """
        if rows.shape[2] == 1:
            return None
        if self._masks is not None:
            return self._masks(rows, int(self._positions[first]))
        key = rows.device, rows.dtype, first
        if key not in self._made:
            own = self._positions[first : first + rows.shape[2], None]
            later = (torch.arange(stop) > own).to(rows.device)
            self._made[key] = additive(later, rows, self._base)[None, None]
        return self._made[key]


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """Attention of the last C of S tokens, [1, C, H, d], by a kernel without a mask.

    None if torch has no such kernel for these tensors; warns (`SlowAttentionWarning`) once if
    FlashAttention does not support them.

    Args:
        query: [1, H, C, d].
        keys: [G, S, d].
        values: [G, S, d].
        scale: factor of q . k.
    """
    if (output := _split_attention(query, keys, values, scale)) is not None:
        return output
    # Tensor subclasses cannot be created under a dispatch mode such as torch's FlopCounterMode.
    with _disable_current_modes():
        bias = causal_lower_right(1, 1)
    # Set later, since the constructor would make a tensor of 2 x C x S numbers.
    bias.seq_len_q, bias.seq_len_kv = query.shape[2], keys.shape[1]
    states = query, keys[None], values[None]
    # Not every build of torch has FlashAttention.
    if kernels.can_use_flash_attention(kernels.SDPAParams(*states, None, 0.0, False, True)):
        output = scaled_dot_product_attention(*states, attn_mask=bias, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)
    _warn_once()
    grouped = _by_group(query, keys, values)
    params = kernels.SDPAParams(*grouped, None, 0.0, False, False)
    if not kernels.can_use_efficient_attention(params):
        return None
    return _grouped_attention(query, keys, values, bias, scale)


def _split_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """Like `causal_attention`, by cuDNN, which is faster for long chunks on Hopper; else None.

    cuDNN only aligns a causal mask with the first key. So the chunk attends to the tokens before it
    without a mask and to itself with one, and the two results are merged in float32 by their
    log-sum-exp. Source: ours.
    """
    past = keys.shape[1] - query.shape[2]
    if not past or query.shape[2] < _LEAST_SPLIT or capability(query.device)[0] != 9:
        return None
    params = kernels.SDPAParams(query, keys[None], values[None], None, 0.0, False, True)
    if not kernels.can_use_cudnn_attention(params):
        return None
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def part(own: slice, causal: bool) -> Any:
        states = query, keys[None, :, own], values[None, :, own]
        return attend(*states, None, True, 0.0, causal, False, scale=scale)[:2]

    (old, far), (new, near) = part(slice(past), False), part(slice(past, None), True)
    weight = torch.sigmoid(near - far).reshape(*query.shape[:3], 1)
    # Float32 because the weights are, in a single tensor.
    merged: Tensor = (old * (1 - weight)).addcmul_(new, weight)
    return merged.to(query.dtype).transpose(1, 2)


def _by_group(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each as [G, H/G, n, d]: KV heads as the batch, with views of their keys for each query head.

    Stock sdpa would copy keys and values for each query head.
    """
    shared = query[0].unflatten(0, (len(keys), -1))
    size = (*shared.shape[:2], keys.shape[1], -1)
    return shared, keys[:, None].expand(size), values[:, None].expand(size)


def _grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """[1, C, H, d], with views of the keys for each query head; see `_by_group`."""
    states = _by_group(query, keys, values)
    output = scaled_dot_product_attention(*states, attn_mask=mask, scale=scale)
    return output.reshape(1, *query.shape[1:3], -1).transpose(1, 2)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "Chunks of the prompt attend more slowly, without FlashAttention. It needs float16 or "
        "bfloat16, equal head dimensions up to 256 for keys and values, compute capability 8.0 or "
        "newer, and a build of torch that has it (those for Windows may not).",
        SlowAttentionWarning,
        stacklevel=2,
    )


@contextmanager
def rotations(decoder: Any, table: Callable[[Callable[..., Any], Any], Any]) -> Iterator[None]:
    """In the block, the model rotates position t by row t of one table of cos and sin [1, T, d].

    Some rotations depend on the last position of a pass ("dynamic", "longrope"), so a pass over
    some tokens must use the table of the whole prompt.

    Args:
        decoder: decoder of the model, with a rotary module.
        table: called with the model's own function and the hidden states at the first use;
            returns (cos, sin).
    """
    rotary = rotary_module(decoder)
    rotate, tables = rotary.forward, dict[Any, Any]()

    def forward(x: Tensor, position_ids: Tensor, layer_type: Any = None) -> tuple[Tensor, ...]:
        # Layer kinds that rotate differently have their own tables.
        if layer_type not in tables:
            kinds = () if layer_type is None else (layer_type,)
            tables[layer_type] = table(lambda *args: rotate(*args, *kinds), x)
        # The first of several axes, see `rotary_positions`.
        places = position_ids.reshape(-1, position_ids.shape[-1])[0]
        # Looking at positions on a GPU would synchronise.
        if places.device.type == "cpu" and int(places[-1] - places[0]) + 1 == len(places):
            # A view, since reading layer by layer holds the rotations of all chunks.
            first, last = int(places[0]), int(places[-1])
            return tuple(part[:, first : last + 1] for part in tables[layer_type])
        return tuple(part[:, places.to(part.device)] for part in tables[layer_type])

    # Other threads that run the model use their own rotations.
    with replaced_forward(rotary, own_thread(forward, rotate)):
        yield
