"""Attention of some of the prompt's tokens over captured keys and values, and their rotations.

Both the chunked prefill and the second pass for missing queries run some tokens of the prompt
through the model while the keys and values of all tokens lie in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.attention_patch import AttentionCall
from gracekv.undo import undone

# Elements of the mask of a second pass, which every layer reads, and its least and most tokens.
_MASK, _LEAST, _MOST = 2**25, 128, 1024
# Most rows that attend at once on a CPU, and elements of their mask, which is small beside keys.
_ROWS, _ROW_MASK = 256, 2**22


def chunk_length(length: int) -> int:
    """Tokens that run at once against `length` keys: their mask has at most 2^25 elements."""
    return max(_LEAST, min(_MOST, _MASK // max(1, length)))


class CausalMasks:
    """Additive masks of tokens that follow one another: views of one tensor.

    Args:
        base: the model's stock attention implementation, "sdpa" or "eager".
        length: T, tokens of the prompt.
    """

    def __init__(self, base: str, length: int) -> None:
        self._base, self._length = base, length
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, query: Tensor, first: int) -> Tensor:
        """[1, 1, n, first + n] in the dtype of query [1, H, n, d], of positions from `first` on."""
        key, rows = (query.device, query.dtype), query.shape[2]
        if key not in self._made or len(self._made[key]) < rows:
            place = torch.arange(rows + self._length, device=query.device) - self._length
            later = place > torch.arange(rows, device=query.device)[:, None]
            self._made[key] = additive(later, query, self._base)
        start = self._length - first
        return self._made[key][None, None, :rows, start : start + first + rows]


def additive(hidden: Tensor, query: Tensor, base: str) -> Tensor:
    """0, and where `hidden` (bool [Q, S]) holds what hides a key, in the dtype of `query`."""
    # Eager attention adds the mask before a softmax that must not see -inf alone.
    lowest = torch.finfo(query.dtype).min if base == "eager" else -torch.inf
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, lowest)


class PartialAttention:
    """Attention of tokens at some positions, each to the keys up to its own position.

    Args:
        base: the model's stock attention implementation, "sdpa" or "eager".
        positions: int64 [C] ascending, absolute, on the CPU.
        masks: makes the masks where positions follow one another.
    """

    def __init__(self, base: str, positions: Tensor, masks: CausalMasks | None = None) -> None:
        self._base, self._positions, self._masks = base, positions, masks
        self._made: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def __call__(self, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        """What the model's attention function returns for query [1, H, C, d].

        `keys` and `values` are [G, T, d] at least up to the last position.
        """
        size = chunk_length(keys.shape[1])
        if query.device.type == "cpu":
            size = max(32, min(_ROWS, _ROW_MASK // max(1, keys.shape[1])))
        outputs = []
        for first, rows in zip(
            range(0, len(self._positions), size), query.split(size, dim=2), strict=True
        ):
            stop = int(self._positions[first + rows.shape[2] - 1]) + 1
            mask = self._mask(rows, first, stop)
            outputs.append(self._attend(call, rows, keys[:, :stop], values[:, :stop], mask))
        return torch.cat(outputs, dim=1), None

    def _attend(
        self, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """[1, n, H, d]."""
        if self._base == "eager":
            eager: Tensor = call.output(query, keys[None], values[None], mask)[0]
            return eager
        # KV heads as the batch and their query heads as views of one key: stock sdpa would copy
        # keys and values once per query head.
        groups, dim = len(keys), values.shape[-1]
        shared = query[0].unflatten(0, (groups, -1))
        size = (groups, shared.shape[1], keys.shape[1], -1)
        output = scaled_dot_product_attention(
            shared,
            keys[:, None].expand(size),
            values[:, None].expand(size),
            attn_mask=mask,
            scale=call.scale,
        )
        return output.reshape(1, -1, query.shape[2], dim).transpose(1, 2)

    def _mask(self, rows: Tensor, first: int, stop: int) -> Tensor:
        """Additive mask [1, 1, n, stop] of the rows [1, H, n, d] from the one at `first` on."""
        if self._masks is not None:
            return self._masks(rows, int(self._positions[first]))
        key = rows.device, rows.dtype, first
        if key not in self._made:
            own = self._positions[first : first + rows.shape[2], None]
            later = (torch.arange(stop) > own).to(rows.device)
            self._made[key] = additive(later, rows, self._base)[None, None]
        return self._made[key]


@contextmanager
def rotations(decoder: Any, table: Callable[[Callable[..., Any], Any], Any]) -> Iterator[None]:
    """Inside, the model rotates position t by row t of one table of cosines and sines [1, T, d].

    Some rotations depend on the longest position of a pass ("dynamic", "longrope"), so a pass over
    some tokens must use the table of the whole prompt.

    Args:
        decoder: of the model.
        table: called with the model's own function and the hidden states at the first use;
            returns (cos, sin).

    Raises `UnsupportedModelError` if the decoder has no module `rotary_emb`.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no module rotary_emb, so its tokens cannot be run in "
            f"parts. Use a chunk that is at least the prompt's length."
        )
    before = vars(rotary).get("forward")
    own = rotary.forward
    made: dict[Any, Any] = {}

    def forward(x: Tensor, position_ids: Tensor, layer_type: Any = None) -> tuple[Tensor, ...]:
        # Where kinds of layers rotate differently, each has its own table.
        if layer_type not in made:
            kinds = () if layer_type is None else (layer_type,)
            made[layer_type] = table(lambda *args: own(*args, *kinds), x)
        # The first of several axes, see `rotary_positions`.
        places = position_ids.reshape(-1, position_ids.shape[-1])[0]
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            # A view: layer by layer, those of all chunks are held.
            return tuple(part[:, first : last + 1] for part in made[layer_type])
        return tuple(part[:, places.to(part.device)] for part in made[layer_type])

    def undo() -> None:
        if before is not None:
            rotary.forward = before
        elif "forward" in vars(rotary):
            del rotary.forward

    with undone(undo):
        rotary.forward = forward
        yield
