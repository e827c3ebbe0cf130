"""Attention with torch's fused CPU kernel, or plain batched matrix products elsewhere.

Every new token sees every packed entry, so the query heads of a group, the new tokens and all
continuations become the rows of one product per KV head: keys are read once and never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, AttentionBackend, AttentionStep, Partial, combine
from gracekv.cache.base import RaggedEntries
from gracekv.cache.coded import CodedEntries, by_coding
from gracekv.cache.quantised import QuantisedEntries
from gracekv.errors import BackendUnavailableError
from gracekv.kernels import ragged
from gracekv.kernels.addresses import contiguous_rows
from gracekv.kernels.linalg import capped

# Maximum logits (query rows x tail entries) of the tail at once; longer turns run in blocks.
_TAIL_LOGITS = 1 << 22
# Likewise for a head's packed entries.
_PACKED_LOGITS = 1 << 25
# Quantised entries of a layer that are dequantised at once. Ours.
_PIECE = 2**12
# Query rows per thread of the fused kernel, and minimum number of entries of a window. Ours.
_THREAD_ROWS, _SHORTEST = 32, 64

Layer: TypeAlias = RaggedEntries | QuantisedEntries
# Takes rows [B, G, R, d], keys and values [B, G, S, d], and a bias to add to the logits, or None;
# returns output [B, G, R, d] and log-sum-exp [B, G, R].
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class HeadViews:
    """The entries of a layer, row by row; row offsets are known without reading a tensor.

    Attributes:
        heads: G.
        sequences: S.
        threads: number of threads that read a head's entries in parallel.
        exact: keys [n, d], values [n, d] and log multiplicities [n] of each of S*G rows.
        coded: the quantised parts of each coding, stacked when they are read, and their pieces:
            first entry, and number of entries in each row of each part.
    """

    heads: int
    sequences: int
    threads: int
    exact: tuple[tuple[Tensor, ...], ...]
    coded: tuple[tuple[tuple[CodedEntries, ...], list[tuple[int, list[int]]]], ...]

    def pieces(self) -> Iterator[Sequence[tuple[Tensor, ...]]]:
        """Yield keys and values [n, d] and log multiplicities [n] of each row, piece by piece.

        Quantised entries become float32, at most `_PIECE` at once.
        """
        yield self.exact
        rows = len(self.exact)
        for parts, steps in self.coded:
            part = CodedEntries.stack(parts)
            for first, counts in steps:
                stop = first + sum(counts)
                columns = (*part.numbers(first, stop), part.log_multiplicity[first:stop])
                split = [x.split(counts) for x in columns]
                if len(parts) == 1:
                    yield list(zip(*split, strict=True))
                else:  # row r of every passage
                    yield [tuple(torch.cat(x[r::rows]) for x in split) for r in range(rows)]


@BACKENDS.register("sdpa")
class Sdpa(AttentionBackend):
    """Head by head: fused attention on the CPU, matrix products elsewhere.

    Source: ours; splitting the keys and combining by log-sum-exp is flash decoding's idea.

    Cost: a step reads each packed entry once, in one call per head and sequence; nothing is held in
    addition to the cache.

    Attributes:
        kernel: "fused" is torch's CPU flash attention, which also returns the log-sum-exp; "plain"
            is two matrix products in float32, on any device; "auto" uses "fused" on the CPU. The
            fused kernel does not cap logits: with a softcap, "plain" is used.

    Keys and values are never copied or padded; quantised entries are dequantised in pieces, and a
    step copies the codes of an extended context, one width at a time, to read them at once. If a
    head has too few queries for all threads, each thread reads a window of its entries.
    """

    kernel: Literal["auto", "fused", "plain"] = "auto"

    def prepare(self, layer: Layer) -> HeadViews:
        threads = torch.get_num_threads() if self._fused(layer.device) else 1
        rows = [layer.exact.head(g, s) for s in range(layer.sequences) for g in range(layer.heads)]
        exact = tuple((keys, values, log_m) for keys, values, _, log_m in rows)
        coded = tuple((parts, _pieces(parts)) for parts in by_coding(layer.coded))
        return HeadViews(layer.heads, layer.sequences, threads, exact, coded)

    def held_bytes(self, prepared: HeadViews) -> int:
        return 0

    def __call__(self, step: AttentionStep) -> Tensor:
        return combine(self.packed(step), self.tail(step), step.sink_logits).to(step.query.dtype)

    def packed(self, step: AttentionStep) -> Partial:
        """Attention to the packed entries only, in float32."""
        query, entries = step.query, step.packed
        heads, tokens, dim = query.shape[1:]
        group = heads // entries.heads
        attend, threads = self._kernel(step), entries.threads
        output = query.new_zeros(query.shape, dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
        slices = [slice(first, first + group) for first in range(0, heads, group)]
        places = [(x, at) for x in step.rows_of(entries.sequences) for at in slices]
        for number, piece in enumerate(entries.pieces()):
            for place, (keys, values, bias) in zip(places, piece, strict=True):
                asked = query[place].reshape(1, 1, -1, dim)
                # The fused kernel divides by the number of queries and of keys.
                if not asked.numel() or not len(keys):
                    continue
                found = _windowed(attend, asked.to(keys), keys, values, bias, threads)
                if number > 0:
                    before = output[place].reshape(1, 1, -1, dim), lse[place].reshape(1, 1, -1)
                    both = torch.logaddexp(before[1], found.lse)
                    found = Partial(combine(Partial(*before), found), both)
                output[place] = found.output.view(-1, group, tokens, dim)
                lse[place] = found.lse.view(-1, group, tokens).to(lse)
        return Partial(output, lse)

    def tail(self, step: AttentionStep) -> Partial:
        """Attention to the tail only, in the query's dtype."""
        (_, heads, tokens, _), (_, groups, places, _) = step.query.shape, step.keys.shape
        block = max(1, _TAIL_LOGITS // (heads // groups * max(1, places)))
        attend = self._kernel(step)
        if tokens <= block:
            return _tail_block(attend, step)
        starts = range(0, tokens, block)
        turns = (_turn(step, start, min(start + block, tokens)) for start in starts)
        return Partial.of_rows([_tail_block(attend, turn) for turn in turns])

    def _kernel(self, step: AttentionStep) -> Kernel:
        if self._fused(step.query.device) and step.softcap is None:
            return partial(fused, scale=step.scale)
        return partial(plain, scale=step.scale, softcap=step.softcap)

    def _fused(self, device: torch.device) -> bool:
        if self.kernel == "fused" and device.type != "cpu":
            raise BackendUnavailableError(
                f"Sdpa(kernel='fused') is torch's CPU kernel; the cache is on {device}. Use "
                f"kernel='auto' or 'plain'."
            )
        return self.kernel != "plain" and device.type == "cpu"


def fused(
    rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash attention for CPUs: output [B, H, M, d] and log-sum-exp [B, H, M].

    Args:
        rows: queries [B, H, M, d].
        keys: [B, H, E, d].
        values: [B, H, E, d].
        bias: [B, H, 1 or M, E] to add to the logits, or None.
        scale: factor of q . k.
    """
    if bias is not None:
        if rows.dtype == torch.float64:
            # The kernel reads a bias in the rows' dtype, except for rows of 16 bits.
            bias = bias.double()
        bias = bias.expand(-1, -1, rows.shape[2], -1)
    # The kernel assumes contiguous rows.
    keys, values = contiguous_rows(keys, values)
    output, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=bias, scale=scale
    )
    return output, lse


def plain(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `fused`, with two matrix products in float32; the bias is added to capped logits.

    Args:
        rows: queries [B, H, M, d].
        keys: [B, H, E, d].
        values: [B, H, E, d].
        bias: [B, H, 1 or M, E] to add to the capped logits, or None.
        scale: factor of q . k.
        softcap: logit softcap, or None.
    """
    # Half-precision products would round the logits to the model's dtype before the softmax.
    logits = capped(rows.float() @ keys.float().mT * scale, softcap)
    if bias is not None:
        logits = logits + bias
    lse = logits.logsumexp(dim=-1, keepdim=True)
    # Rows that see nothing get weights of 0.
    weights = (logits - lse.clamp(min=torch.finfo(torch.float32).min)).exp()
    return (weights @ values.float()).to(rows.dtype), lse[..., 0]


def _pieces(parts: Sequence[CodedEntries]) -> list[tuple[int, list[int]]]:
    """First entry and counts by row of the pieces of all `parts`, one after another."""
    offsets = ragged.offsets(torch.cat([part.lengths for part in parts]))
    firsts = range(0, int(offsets[-1]), _PIECE)
    return [(first, offsets.clamp(first, first + _PIECE).diff().tolist()) for first in firsts]


def _windowed(
    attend: Kernel, rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor, threads: int
) -> Partial:
    """Attention of rows [1, 1, R, d] to keys [n, d] in float32, one window of keys per thread."""
    most = max(_THREAD_ROWS * threads, _PACKED_LOGITS // len(keys))
    if rows.shape[2] > most:
        some = rows.split(most, dim=2)
        return Partial.of_rows([_windowed(attend, x, keys, values, bias, threads) for x in some])
    few = rows.shape[2] < _THREAD_ROWS * threads
    count = max(1, min(threads, len(keys) // _SHORTEST)) if few else 1
    step = len(keys) // count
    length = len(keys) - (count - 1) * step
    # Windows of equal length overlap; each owns its first `step` entries, the last one all.
    own = bias.unfold(0, length, step)
    if length > step:
        own = own.clone()
        own[:-1, step:] = -math.inf
    keys, values = (x.unfold(0, length, step).mT[None] for x in (keys, values))
    output, lse = attend(rows.expand(1, count, -1, -1), keys, values, own[None, :, None])
    if count == 1:
        return Partial(output.float(), lse)
    mixed = (lse.softmax(dim=1)[..., None] * output.float()).sum(dim=1, keepdim=True)
    return Partial(mixed, lse.logsumexp(dim=1, keepdim=True))


def _turn(step: AttentionStep, start: int, stop: int) -> AttentionStep:
    """The queries [start, stop) of `step` over the part of the tail that they see."""
    left = step.query.shape[2] - stop
    now = replace(step, query=step.query[:, :, start:stop])
    if step.mask is not None:
        return replace(now, mask=step.mask[:, :, start:stop])
    if step.length is not None:
        return replace(now, length=step.length - left)
    seen = step.keys.shape[2] - left
    return replace(now, keys=step.keys[:, :, :seen], values=step.values[:, :, :seen])


def _tail_block(attend: Kernel, step: AttentionStep) -> Partial:
    batch, heads, tokens, dim = step.query.shape
    groups, places = step.keys.shape[1:3]
    if places == 0:
        # The fused kernel divides by the number of keys.
        lse = step.query.new_full((batch, heads, tokens), -math.inf, dtype=torch.float32)
        return Partial(torch.zeros_like(step.query), lse)
    bias, blind = step.tail_bias(), None
    if bias is not None:
        blind = (bias == -math.inf).all(dim=-1)  # [B, 1, Tq]: padding sees nothing
        bias = bias.expand(-1, heads // groups, -1, -1).flatten(1, 2)[:, None]
    output, lse = attend(step.query.reshape(batch, groups, -1, dim), step.keys, step.values, bias)
    lse = lse.reshape(batch, heads, tokens)
    if blind is not None:
        lse = lse.masked_fill(blind, -math.inf)
    return Partial(output.reshape(step.query.shape), lse)
