"""Further tokens over the keys and values of a prefill: `Passes` by a model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.prefill.attention_patch import (
    AttentionCall,
    base_attention,
    input_device,
    patched_attention,
)
from gracekv.prefill.observer import TokenRun
from gracekv.prefill.partial_attention import CausalMasks, PartialAttention
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import longest_sequence


class ModelPasses:
    """A `Passes` that runs a model all of whose layers are compressed.

    Args:
        model: as for `capture`.
        prompt: the prefilled prompt, T tokens.
        keys: L tensors [G, T, d].
        values: L tensors [G, T, d].
        rope: of a layer, the rotations of positions 0..T-1.
        logits: [vocabulary] of the last position.
    """

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rope: Callable[[int], Rope],
        logits: Tensor,
    ) -> None:
        self.model, self.keys, self.values, self.rope = model, keys, values, rope
        self.spans, self.ids, self._tokenizer = prompt.spans, prompt.ids, prompt.tokenizer
        self.first = int(logits.argmax())
        config = getattr(model, "generation_config", None) or model.config
        ends = config.eos_token_id
        self.stops = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def after(self, end: int, count: int) -> _ModelContinuation:
        """A continuation of up to `count` tokens over the keys and values before `end`.

        Raises `UnsupportedModelError` if they pass a bound of the model (a sliding window, a switch
        of its RoPE).
        """
        bound = longest_sequence(self.model, end)
        if bound is not None and end + count > bound[0]:
            raise UnsupportedModelError(
                f"Running {count} tokens more after {end} takes {end + count} positions, "
                f"{type(self.model).__name__} has {bound[0]}: beyond, {bound[1]}. Use a shorter "
                f"context, or a scorer that needs no second pass and no draft."
            )
        return _ModelContinuation(self, end)

    def likeliest(self, state: Tensor) -> int:
        """The most likely token after a decoder's output [D]."""
        return int(self.model.get_output_embeddings()(state[None, None]).argmax(dim=-1))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text inside a prompt; empty without a tokenizer."""
        if self._tokenizer is None:
            return []
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class _ModelContinuation:
    def __init__(self, passes: ModelPasses, end: int) -> None:
        self._passes, self._end = passes, end
        self._keys: list[list[Tensor]] = [[x[:, :end]] for x in passes.keys]
        self._values: list[list[Tensor]] = [[x[:, :end]] for x in passes.values]
        self._count = 0

    def run(self, ids: Tensor, observe: Callable[[int, TokenRun], None]) -> Tensor:
        """As `Continuation.run`. Holds one layer's keys and values once more."""
        model, start = self._passes.model, self._end + self._count
        device, base = input_device(model), base_attention(model)
        positions = torch.arange(start, start + len(ids))
        attention = PartialAttention(base, positions, CausalMasks(base, start + len(ids)))

        def attend(call: AttentionCall) -> Any:
            layer, query = call.layer, call.query
            self._keys[layer].append(call.key[0])
            self._values[layer].append(call.value[0])
            keys, values = (torch.cat(x[layer], dim=1) for x in (self._keys, self._values))
            rope = self._passes.rope(layer)
            observe(layer, TokenRun(start, query[0], keys, values, rope, call.scale, **call.logits))
            return attention(call, query, keys, values)

        with patched_attention(model, attend):
            states = model.get_decoder()(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                use_cache=False,
            ).last_hidden_state
        self._count += len(ids)
        last: Tensor = states[0, -1]
        return last
