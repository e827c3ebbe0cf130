"""Attention with torch's fused CPU kernel, or plain batched matrix products elsewhere.

Every new token sees every packed entry, so the query heads of a group, the new tokens and all
continuations fold into the rows of one product per KV head: keys are read once, never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, AttentionBackend, Partial, sequence_of_row, united
from gracekv.backends.coded_pieces import QuantisedWindows, attend_to_pieces
from gracekv.backends.eager import additive_mask
from gracekv.backends.kv_windows import KVWindows, WindowedLayer
from gracekv.backends.sdpa_kernels import Kernel, fused, plain
from gracekv.cache.base import RaggedLayer
from gracekv.cache.quantised import QuantisedLayer
from gracekv.errors import BackendUnavailableError

# Logits (query rows x tail entries) that the tail may hold at once; longer turns go in blocks.
_TAIL_LOGITS = 1 << 22


@final
@BACKENDS.register("sdpa")
@dataclass(frozen=True, slots=False)
class Sdpa(AttentionBackend):
    """Equal windows over the packed entries; fused attention on the CPU, matrix products elsewhere.

    Source: ours; splitting the keys and combining by log-sum-exp is flash decoding's idea.

    Cost: a step reads each packed entry once; index and bias of the windows are held beside the
    cache, about a twentieth of its bytes.

    Attributes:
        kernel: "fused" is torch's CPU flash attention, which also returns the log-sum-exp; "plain"
            is two matrix products in float32, on any device; "auto" takes "fused" on the CPU. The
            fused one does not cap logits: with a softcap, "plain" is used.

    Keys and values are never copied or padded; quantised entries are dequantised in pieces, head by
    head. A few queries per head read them through `WindowedLayer`, whose index and bias are built
    at the first step and held; many (a long turn) go head by head.
    """

    reads_codes: ClassVar[bool] = True
    takes_softcap: ClassVar[bool] = True
    takes_sink_logits: ClassVar[bool] = True
    kernel: Literal["auto", "fused", "plain"] = "auto"

    def prepare(self, layer: RaggedLayer | QuantisedLayer) -> WindowedLayer | QuantisedWindows:
        self._fused(layer.device)
        if isinstance(layer, QuantisedLayer):
            return QuantisedWindows(WindowedLayer(layer.exact), layer.coded)
        return WindowedLayer(layer)

    def held_bytes(self, prepared: WindowedLayer | QuantisedWindows) -> int:
        return prepared.held_bytes

    def warm_up(self, prepared: WindowedLayer | QuantisedWindows, query_heads: int) -> None:
        windows = prepared.windows if isinstance(prepared, QuantisedWindows) else prepared
        layer = windows.layer
        windows.windows((layer.sequences, query_heads, 1), None)

    def __call__(
        self,
        query: Tensor,
        prepared: WindowedLayer | QuantisedWindows,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        windows = None
        if query.shape[2] == 1 and keys.shape[2] > 0 and isinstance(prepared, WindowedLayer):
            windows = prepared.windows(query.shape[:3], rows)
        if windows is None:
            return super().__call__(
                query, prepared, keys, values, mask, scale, rows,
                softcap=softcap, sink_logits=sink_logits,
            )  # fmt: skip
        # `packed`, `tail` and `combine` in half as many calls: at a few hundred entries a head, the
        # calls dominate the cost of a step.
        batch, groups, length, dim = keys.shape
        folded = query.reshape(batch, groups, -1, dim)
        bias = None if mask is None else additive_mask(mask, 1, length, query.device)
        attend = self._kernel(query.device, softcap)
        tail_output, tail_lse = attend(folded, keys, values, bias, scale)
        if bias is not None:
            tail_lse = tail_lse.masked_fill((bias == -math.inf).all(dim=-1), -math.inf)
        output, lse = _window_parts(attend, query, windows, scale)
        # The fused kernel's output is laid out as [B, n, G], so nothing is copied here.
        lse = torch.cat([lse, windows.blank_lse, tail_lse.mT.reshape(-1)])
        tail_output = tail_output.transpose(1, 2).reshape(-1, dim)
        output = torch.cat([output, windows.blank_output, tail_output])
        parts = torch.take(lse, windows.slots) if windows.mixing is None else lse + windows.mixing
        if sink_logits is not None:
            sink = sink_logits.float().repeat(batch)[:, None]
            parts = torch.cat([parts, sink], dim=-1)
        weights = torch.softmax(parts, dim=-1)
        if sink_logits is not None:
            weights = weights[:, :-1]
        if bias is not None and not windows.complete:
            # Queries of an empty head that see nothing of the tail either.
            weights = weights.nan_to_num(nan=0.0)
        if windows.mixing is None:
            return _mixed(weights, output, windows.slots).view(query.shape)
        return (weights @ output.float()).to(output.dtype).view(query.shape)

    def packed(
        self,
        query: Tensor,
        prepared: WindowedLayer | QuantisedWindows,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
    ) -> Partial:
        if isinstance(prepared, QuantisedWindows):
            exact = self.packed(query, prepared.windows, scale, rows, softcap=softcap)
            attend = self._kernel(query.device, softcap)
            # United in float32 before they meet the exact part's output in the model's dtype.
            coded = [attend_to_pieces(attend, query, x, scale, rows) for x in prepared.coded]
            return united(exact, reduce(united, coded))
        windows = prepared.windows(query.shape[:3], rows)
        if windows is None:
            return self._head_by_head(query, prepared.layer, scale, rows, softcap)
        attend = self._kernel(query.device, softcap)
        output, lse = _window_parts(attend, query, windows, scale)
        slots = windows.slots[:, 1:]
        parts = torch.take(torch.cat([lse, windows.blank_lse]), slots)
        total = torch.logsumexp(parts, dim=-1, keepdim=True)
        weights = (parts - torch.where(total == -math.inf, 0.0, total)).exp()
        output = _mixed(weights, torch.cat([output, windows.blank_output]), slots)
        return Partial(output.view(query.shape), total.view(query.shape[:3]))

    def _head_by_head(
        self,
        query: Tensor,
        layer: RaggedLayer,
        scale: float,
        rows: Tensor | None,
        softcap: float | None,
    ) -> Partial:
        """For many queries a head, where each call of the loop takes long."""
        batch, heads, tokens, dim = query.shape
        group = heads // layer.heads
        of_row = sequence_of_row(rows, batch, layer.sequences, query.device)
        attend = self._kernel(query.device, softcap)
        threads = torch.get_num_threads() if self._fused(query.device) else 1
        output = query.new_zeros(query.shape)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
        for sequence in range(layer.sequences):
            of_sequence = (of_row == sequence).nonzero()[:, 0]
            folded = len(of_sequence) * group * tokens
            # The kernel gives each thread whole blocks of queries; few queries are one block.
            split = max(m for m in range(1, threads + 1) if folded % m == 0)
            for head in range(layer.heads if folded else 0):
                keys, values, _, log_multiplicity = layer.head(head, sequence)
                at = slice(head * group, (head + 1) * group)
                part, total = _attend(
                    attend,
                    query[of_sequence, at].reshape(1, split, folded // split, dim),
                    keys.expand(1, split, -1, -1),
                    values.expand(1, split, -1, -1),
                    log_multiplicity.expand(1, split, 1, -1),
                    scale,
                )
                if len(keys):
                    output[of_sequence, at] = part.reshape(-1, group, tokens, dim)
                    lse[of_sequence, at] = total.reshape(-1, group, tokens)
        return Partial(output, lse)

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
        group, tokens = query.shape[1] // keys.shape[1], query.shape[2]
        block = max(1, _TAIL_LOGITS // (group * max(1, keys.shape[2])))
        attend = self._kernel(query.device, softcap)
        if tokens == 1 and mask is None:
            return _tail_block(attend, query, keys, values, None, scale)
        if tokens <= block:
            bias = additive_mask(mask, tokens, keys.shape[2], query.device)
            return _tail_block(attend, query, keys, values, bias, scale)
        parts = []
        for start in range(0, tokens, block):
            stop = min(start + block, tokens)
            # Without a mask, these queries see no token after the last of them.
            seen = keys.shape[2] - tokens + stop if mask is None else keys.shape[2]
            part = None if mask is None else mask[:, :, start:stop]
            bias = additive_mask(part, stop - start, seen, query.device)
            now, k, v = query[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen]
            parts.append(_tail_block(attend, now, k, v, bias, scale))
        return Partial(
            torch.cat([part.output for part in parts], dim=2),
            torch.cat([part.lse for part in parts], dim=2),
        )

    def _kernel(self, device: torch.device, softcap: float | None) -> Kernel:
        if self._fused(device) and softcap is None:
            return fused
        return partial(plain, softcap=softcap)

    def _fused(self, device: torch.device) -> bool:
        if self.kernel == "fused" and device.type != "cpu":
            raise BackendUnavailableError(
                f"Sdpa(kernel='fused') is torch's CPU kernel; the cache lies on {device}. Use "
                f"kernel='auto' or 'plain'."
            )
        return self.kernel != "plain" and device.type == "cpu"


def _tail_block(
    attend: Kernel,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Partial:
    batch, heads, tokens, dim = query.shape
    groups = keys.shape[1]
    folded = query.reshape(batch, groups, -1, dim)
    blind = None
    if bias is not None:
        blind = (bias == -math.inf).all(dim=-1)  # [B, 1, Tq]: padding sees nothing
        bias = bias.expand(-1, heads // groups, -1, -1).flatten(1, 2)[:, None]
    output, lse = _attend(attend, folded, keys, values, bias, scale)
    lse = lse.reshape(batch, heads, tokens)
    if blind is not None:
        lse = lse.masked_fill(blind, -math.inf)
    return Partial(output.reshape(query.shape), lse)


def _attend(
    attend: Kernel, rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, G, R, d] and lse [B, G, R]; rows that see nothing give 0 and any lse."""
    if keys.shape[2] == 0:
        # The fused kernel divides by the number of keys.
        lse = rows.new_full(rows.shape[:3], -math.inf, dtype=torch.float32)
        return torch.zeros_like(rows), lse
    return attend(rows, keys, values, bias, scale)


def _window_parts(
    attend: Kernel, query: Tensor, windows: KVWindows, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [C * R, d] and lse [C * R] of every window row."""
    dim = query.shape[-1]
    # `embedding` is an index_select that keeps the index's shape.
    folded = torch.embedding(query.reshape(-1, dim), windows.gather)
    output, lse = attend(folded, windows.keys, windows.values, windows.bias, scale)
    return output.view(-1, dim), lse.view(-1)


def _mixed(weights: Tensor, output: Tensor, slots: Tensor) -> Tensor:
    """[queries, 1, d]: weighted sums, in float32, of the outputs that lie in the slots."""
    parts = torch.embedding(output, slots).float()
    return torch.bmm(weights.unsqueeze(1), parts).to(output.dtype)
