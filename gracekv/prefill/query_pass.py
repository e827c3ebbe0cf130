"""Computes queries that a capture did not keep, by running their tokens once more.

The tokens attend to the captured keys and values, each up to its own position, so they pass through
the same states as in the prefill and the rest of the prompt need not run. Their queries equal those
of the prefill up to the rounding of matrix products of other shapes.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracekv.prefill.attention_patch import (
    AttentionCall,
    base_attention,
    input_device,
    patched_attention,
)
from gracekv.prefill.model_layers import compressed_layers, rotating, table_of_rope
from gracekv.prefill.partial_attention import PartialAttention, chunk_length, rotations
from gracekv.prefill.past import widened

if TYPE_CHECKING:
    from gracekv.prefill.base import Prefill


class _LastLayer(Exception):
    """Ends a pass after the last layer whose queries are wanted."""


class QueryPass:
    """A `QuerySource` that runs a model.

    Args:
        model: as for `capture`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def __call__(self, prefill: Prefill, positions: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """L tensors [H, P, d]; [H, 0, d] for layers that are not in `layers`.

        Args:
            prefill: with the keys, values, rotations and ids of the prompt.
            positions: int64 [P] ascending, on the CPU.
            layers: whose queries are wanted, ascending.

        Costs the matrix products of P tokens up to the last of `layers`.
        """
        wanted, compressed = set(layers), compressed_layers(self._model)
        made: list[Tensor] = [held[:, :0] for held in prefill.queries]
        for layer in wanted:
            heads, _, dim = made[layer].shape
            made[layer] = made[layer].new_empty(heads, len(positions), dim)
        base, decoder = base_attention(self._model), self._model.get_decoder()
        assert prefill.token_ids is not None  # `capture`, which makes this object, keeps them
        device = input_device(self._model)

        def table(own: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = table_of_rope(prefill.rope, rotating(compressed))
            return cos[None].to(x.device, x.dtype), sin[None].to(x.device, x.dtype)

        def attend(rows: slice, attention: PartialAttention, call: AttentionCall) -> Any:
            layer, dim = call.layer, call.query.shape[-1]
            query = widened(call.query, prefill.head_dim, 1 / prefill.scale)
            if layer in wanted:
                made[layer][:, rows] = query[0]
            if layer == layers[-1]:
                raise _LastLayer
            output, *rest = attention(call, query, prefill.keys[layer], prefill.values[layer])
            return output[..., :dim], *rest

        size = chunk_length(prefill.spans.length)
        for first in range(0, len(positions), size):
            some = positions[first : first + size]
            pass_of_some = partial(attend, slice(first, first + size), PartialAttention(base, some))
            with (
                patched_attention(self._model, pass_of_some),
                rotations(decoder, table),
                suppress(_LastLayer),
            ):
                decoder(
                    input_ids=prefill.token_ids[some][None].to(device),
                    position_ids=some[None].to(device),
                    use_cache=False,
                )
        return made
