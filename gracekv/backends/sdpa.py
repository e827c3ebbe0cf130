"""Padded attention with torch's fused CPU kernel, or plain batched matrix products elsewhere.

Every new token sees every packed entry, so the query heads of a group, the new tokens and all
continuations fold into the rows of one product per KV head: keys are read once, never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from einops import rearrange
from torch import Tensor

from gracekv.backends.base import BACKENDS, Backend, Partial, sequence_of_row
from gracekv.backends.eager import additive_mask
from gracekv.cache.base import RaggedLayer
from gracekv.errors import BackendUnavailableError, ConfigError

# Logits (query rows x tail entries) that the tail may hold at once; longer turns go in blocks.
_TAIL_LOGITS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """One layer with its heads padded to the longest.

    Attributes:
        keys: [S, G, E_max, d]; unused places hold 0.
        values: [S, G, E_max, d].
        bias: float32 [S, G, 1, E_max], log multiplicity, -inf in unused places; None if all are 0.
        empty: bool [S, G, 1], heads without entries; None if there is none.
        copied: whether keys and values are copies (False: views of the packed tensors).
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    empty: Tensor | None
    copied: bool


@final
@BACKENDS.register("sdpa")
@dataclass(frozen=True, slots=False)
class Sdpa(Backend):
    """Heads padded to the longest; fused attention on the CPU, matrix products elsewhere.

    Source: ours.

    Attributes:
        kernel: "fused" is torch's CPU flash attention, which also returns the log-sum-exp; "plain"
            is two matrix products in float32, on any device; "auto" takes "fused" on the CPU.

    The padded copy is built once per layer; heads of equal length are used in place, without one.
    """

    kernel: Literal["auto", "fused", "plain"] = "auto"

    def __post_init__(self) -> None:
        if self.kernel not in ("auto", "fused", "plain"):
            raise ConfigError(
                f"Sdpa.kernel takes one of 'auto', 'fused', 'plain'; got {self.kernel!r}."
            )

    def prepare(self, layer: RaggedLayer) -> Padded:
        self._fused(layer.keys.device)
        lengths, heads, device = layer.lengths, layer.heads, layer.keys.device
        lengths = lengths.view(layer.sequences, heads)
        longest = int(lengths.max())
        shape = (*lengths.shape, longest, layer.keys.shape[-1])
        even = bool((lengths == longest).all())
        if even:
            keys = layer.keys.view(shape)
            values = layer.values.view(shape)
            bias = layer.log_multiplicity.view(*lengths.shape, 1, longest)
        else:
            used = (torch.arange(longest) < lengths[..., None]).to(device)
            keys, values = layer.keys.new_zeros(shape), layer.values.new_zeros(shape)
            keys[used], values[used] = layer.keys, layer.values
            bias = torch.full((*lengths.shape, 1, longest), -math.inf, device=device)
            bias[:, :, 0][used] = layer.log_multiplicity
        empty = (lengths == 0).to(device)[..., None] if bool((lengths == 0).any()) else None
        return Padded(keys, values, bias if bool((bias != 0).any()) else None, empty, not even)

    def held_bytes(self, prepared: Padded) -> int:
        held = [prepared.empty]
        if prepared.copied:
            held += [prepared.keys, prepared.values, prepared.bias]
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def packed(
        self, query: Tensor, prepared: Padded, scale: float, rows: Tensor | None = None
    ) -> Partial:
        batch, heads, tokens, _ = query.shape
        sequences, groups = prepared.keys.shape[:2]
        keys, values, bias, empty = prepared.keys, prepared.values, prepared.bias, prepared.empty
        of_row = sequence_of_row(rows, batch, sequences, query.device)
        if rows is not None and sequences > 1:
            keys, values = keys[of_row], values[of_row]
            bias = None if bias is None else bias[of_row]
            empty = None if empty is None else empty[of_row]
            sequences = batch
        folded = rearrange(query, "(s b) (g n) t d -> s g (b n t) d", s=sequences, g=groups)
        output, lse = self._attend(folded, keys, values, bias, scale)
        if empty is not None:
            lse = lse.masked_fill(empty, -math.inf)
        axes = {"b": batch // sequences, "n": heads // groups, "t": tokens}
        return Partial(
            rearrange(output, "s g (b n t) d -> (s b) (g n) t d", **axes),
            rearrange(lse, "s g (b n t) -> (s b) (g n) t", **axes),
        )

    def tail(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Partial:
        group, tokens = query.shape[1] // keys.shape[1], query.shape[2]
        block = max(1, _TAIL_LOGITS // (group * max(1, keys.shape[2])))
        if tokens == 1 and mask is None:
            return self._tail_block(query, keys, values, None, scale)
        if tokens <= block:
            bias = additive_mask(mask, tokens, keys.shape[2], query.device)
            return self._tail_block(query, keys, values, bias, scale)
        parts = []
        for start in range(0, tokens, block):
            stop = min(start + block, tokens)
            # Without a mask, what these queries see ends where the last of them stands.
            seen = keys.shape[2] - tokens + stop if mask is None else keys.shape[2]
            part = None if mask is None else mask[:, :, start:stop]
            bias = additive_mask(part, stop - start, seen, query.device)
            parts.append(
                self._tail_block(
                    query[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], bias, scale
                )
            )
        return Partial(
            torch.cat([part.output for part in parts], dim=2),
            torch.cat([part.lse for part in parts], dim=2),
        )

    def _tail_block(
        self, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
    ) -> Partial:
        groups, tokens = keys.shape[1], query.shape[2]
        group = query.shape[1] // groups
        blind = None
        if bias is not None:
            blind = (bias == -math.inf).all(dim=-1)  # [B, 1, Tq]: padding sees nothing
            bias = rearrange(
                bias[:, :, None].expand(-1, -1, group, -1, -1), "b g n t s -> b g (n t) s"
            )
        rows = rearrange(query, "b (g n) t d -> b g (n t) d", g=groups)
        output, lse = self._attend(rows, keys, values, bias, scale)
        output = rearrange(output, "b g (n t) d -> b (g n) t d", t=tokens)
        lse = rearrange(lse, "b g (n t) -> b (g n) t", t=tokens)
        return Partial(output, lse if blind is None else lse.masked_fill(blind, -math.inf))

    def _attend(
        self, rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, G, R, d] and lse [B, G, R]; rows that see nothing give 0 and any lse."""
        if keys.shape[2] == 0:
            # The fused kernel divides by the number of keys.
            return torch.zeros_like(rows), rows.new_full(
                rows.shape[:3], -math.inf, dtype=torch.float32
            )
        attend = _fused if self._fused(rows.device) else _plain
        return attend(rows, keys, values, bias, scale)

    def _fused(self, device: torch.device) -> bool:
        if self.kernel == "fused" and device.type != "cpu":
            raise BackendUnavailableError(
                f"Sdpa(kernel='fused') is torch's CPU kernel; the cache lies on {device}. Use "
                f"kernel='auto' or 'plain'."
            )
        return self.kernel != "plain" and device.type == "cpu"


def _fused(
    rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        bias = bias.expand(-1, -1, rows.shape[2], -1)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=bias, scale=scale
    )
    return output, lse


def _plain(
    rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    # Half-precision products would round the logits to the model's dtype before the softmax.
    logits = rows.float() @ keys.float().mT * scale
    if bias is not None:
        logits = logits + bias
    top = logits.amax(dim=-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (logits - top).exp()
    total = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    output = (weights / total) @ values.float()
    return output.to(rows.dtype), (top + total.log())[..., 0]
