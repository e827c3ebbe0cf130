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

# Elements of one chunk's mask, which every layer reads, and the smallest and largest chunk.
_MASK, _LEAST, _MOST = 2**25, 128, 1024


def chunk_length(length: int) -> int:
    """Tokens that run at once against `length` keys: their mask has at most 2^25 elements."""
    return max(_LEAST, min(_MOST, _MASK // max(1, length)))


class PartialAttention:
    """Attention of tokens at some positions, each to the keys up to its own position.

    Args:
        base: the model's stock attention implementation, "sdpa" or "eager".
        positions: int64 [C] ascending, absolute, on the CPU.
    """

    def __init__(self, base: str, positions: Tensor) -> None:
        self._base, self._positions = base, positions
        self.stop = int(positions[-1]) + 1
        self._masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(
        self, stock: Any, module: Any, query: Tensor, keys: Tensor, values: Tensor, **kwargs: Any
    ) -> Any:
        """What the model's attention function returns for query [1, H, C, d].

        `keys` and `values` are [G, at least `stop`, d]; `stock` is the model's own function.
        """
        keys, values = keys[:, : self.stop], values[:, : self.stop]
        mask = self._mask(query)
        if self._base == "eager":
            return stock(module, query, keys[None], values[None], mask, **kwargs)
        # KV heads as the batch and their query heads as views of one key: stock sdpa would copy
        # keys and values once per query head.
        groups, dim = len(keys), values.shape[-1]
        shared = query[0].unflatten(0, (groups, -1))
        size = (groups, shared.shape[1], self.stop, -1)
        output = scaled_dot_product_attention(
            shared,
            keys[:, None].expand(size),
            values[:, None].expand(size),
            attn_mask=mask,
            scale=kwargs["scaling"],
        )
        return output.reshape(1, -1, query.shape[2], dim).transpose(1, 2).contiguous(), None

    def _mask(self, query: Tensor) -> Tensor:
        """Additive mask [1, 1, C, stop] in the query's dtype, made once for all layers."""
        key = query.device, query.dtype
        if key not in self._masks:
            later = torch.arange(self.stop) > self._positions[:, None]
            # Eager attention adds the mask before a softmax that must not see -inf alone.
            hidden = torch.finfo(query.dtype).min if self._base == "eager" else -torch.inf
            mask = torch.zeros(later.shape, dtype=query.dtype)
            mask.masked_fill_(later, hidden)
            self._masks[key] = mask.to(query.device)[None, None]
        return self._masks[key]


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
        return tuple(part[:, places.to(part.device)] for part in made[layer_type])

    rotary.forward = forward
    try:
        yield
    finally:
        if before is None:
            del rotary.forward
        else:
            rotary.forward = before
