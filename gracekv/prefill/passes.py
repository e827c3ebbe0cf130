"""Runs tokens over the keys and values of a prefill: further ones, or its own again.

`ModelPasses` runs further tokens. `queries_again` computes queries that a capture did not keep. Its
tokens attend to the captured keys and values, each up to its own position, so they go through the
same states as in the prefill without running the rest of the prompt; the queries equal those of the
prefill up to the rounding of matrix products of other shapes.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.attention_patch import AttentionCall, Enough, base_attention, patched_attention
from gracekv.prefill.base import Prefill
from gracekv.prefill.chat_text import plain_ids
from gracekv.prefill.length_limits import longest_sequence
from gracekv.prefill.model_layers import compressed_layers, input_device, rotating, table_of_rope
from gracekv.prefill.observer import TokenRun
from gracekv.prefill.partial_attention import CausalMasks, PartialAttention, chunk_length, rotations
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.recorder import Recorder
from gracekv.prefill.spans import widened
from gracekv.undo import full_float32


class ModelPasses:
    """A `Passes` for a model whose layers are all compressed.

    Args:
        model: as for `capture`.
        prompt: the prefilled prompt, T tokens.
        record: the keys, values and rotations of the prompt.
        logits: [vocabulary] of the last position.
    """

    def __init__(self, model: Any, prompt: Prompt, record: Recorder, logits: Tensor) -> None:
        self.model, self.record = model, record
        self.spans, self.ids, self._tokenizer = prompt.spans, prompt.ids, prompt.tokenizer
        self.tail = self.ids[self.spans.question_end :] if prompt.tail is None else prompt.tail
        self.first = int(logits.argmax())
        ends = (getattr(model, "generation_config", None) or model.config).eos_token_id
        self.stops = frozenset(end_ids(ends))

    def after(self, end: int, count: int) -> _ModelContinuation:
        """A continuation of up to `count` tokens over the keys and values before `end`.

        Raises `UnsupportedModelError` if a length limit of the model (a sliding window, a switch of
        its RoPE) lies between them and the prompt.
        """
        bound, last, length = longest_sequence(self.model, end), end + count, self.spans.length
        if bound is not None and (last > bound[0]) != (length > bound[0]):
            raise UnsupportedModelError(
                f"The prompt has {length} tokens, and {count} more after {end} take {last} "
                f"positions. {type(self.model).__name__} has a limit of {bound[0]} in between: "
                f"beyond it, {bound[1]}. Use a prompt of another length, or a scorer that needs no "
                f"second pass and no draft."
            )
        return _ModelContinuation(self, end, end + count)

    def likeliest(self, state: Tensor) -> int:
        """The most likely token after a decoder's output [D]."""
        return int(self.model.get_output_embeddings()(state[None, None]).argmax(dim=-1))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text inside a prompt; empty without a tokenizer."""
        return [] if self._tokenizer is None else plain_ids(self._tokenizer, text)


def end_ids(setting: Any) -> list[int]:
    """The ids in a setting such as `eos_token_id`: None, a number, or several."""
    return [] if setting is None else torch.as_tensor(setting, device="cpu").flatten().tolist()


class _ModelContinuation:
    def __init__(self, passes: ModelPasses, start: int, end: int) -> None:
        self._passes, self._reached, self._end = passes, start, end
        held = passes.record.fields()
        self._keys: list[list[Tensor]] = [[x[:, :start]] for x in held["keys"]]
        self._values: list[list[Tensor]] = [[x[:, :start]] for x in held["values"]]

    def run(self, ids: Tensor, observe: Callable[[int, TokenRun], None]) -> Tensor:
        """As `Continuation.run`. Holds a copy of one layer's keys and values.

        Also keeps those of its own tokens, except in the last run.
        """
        model, start = self._passes.model, self._reached
        device, base = input_device(model), base_attention(model)
        goes_on = start + len(ids) < self._end
        positions = torch.arange(start, start + len(ids))
        attention = PartialAttention(base, positions, CausalMasks(base, start + len(ids)))

        def attend(call: AttentionCall) -> Any:
            layer, query = call.layer, call.query
            new = (self._keys[layer], call.key[0]), (self._values[layer], call.value[0])
            keys, values = (torch.cat([*parts, x], dim=1) for parts, x in new)
            for parts, x in new if goes_on else ():
                # A view could keep a whole projection alive.
                parts.append(x.clone())
            rope = self._passes.record.rope_of(layer)
            run = TokenRun(start, query[0], keys, values, rope, **call.softmax_args)
            with full_float32():
                observe(layer, run)
            return attention(call, query, keys, values)

        row, places = (x[None].to(device) for x in (ids, positions))
        with patched_attention(model, attend):
            states = model.get_decoder()(input_ids=row, position_ids=places, use_cache=False)
        self._reached += len(ids)
        last: Tensor = states.last_hidden_state[0, -1]
        return last


@torch.no_grad()
def queries_again(
    model: Any, prefill: Prefill, positions: Tensor, layers: Sequence[int]
) -> list[Tensor]:
    """A `Prefill.query_source` that runs a model: L tensors [H, P, d], [H, 0, d] for other layers.

    Args:
        model: as for `capture`.
        prefill: the keys, values, rotations and ids of the prompt.
        positions: int64 [P] ascending, on the CPU.
        layers: the layers whose queries are wanted, ascending.

    Costs the matrix products of P tokens up to the last of `layers`.
    """
    numbers, compressed = set(layers), compressed_layers(model)
    sizes = [len(positions) if layer in numbers else 0 for layer in range(prefill.layers)]
    outs = [x.new_empty(len(x), n, x.shape[2]) for x, n in zip(prefill.queries, sizes, strict=True)]
    base, decoder, device = base_attention(model), model.get_decoder(), input_device(model)
    assert prefill.token_ids is not None  # `capture`, which sets this source, keeps them

    def table(rotate: Any, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[None].to(x) for part in table_of_rope(prefill.rope, rotating(compressed)))

    def attend(rows: slice, attention: PartialAttention, call: AttentionCall) -> Any:
        layer = call.layer
        query = widened(call.query, call.scale) if prefill.spans.past else call.query
        if layer in numbers:
            outs[layer][:, rows] = query[0]
        if layer == layers[-1]:
            raise Enough
        return attention(call, query, prefill.keys[layer], prefill.values[layer])

    size, kind = chunk_length(prefill.spans.length), prefill.keys[layers[-1]].dtype
    # Stages run without the autocast under which the prompt was read.
    casts = torch.autocast(device.type, kind, enabled=kind != model.dtype)
    for first in range(0, len(positions), size):
        some = positions[first : first + size]
        patch = partial(attend, slice(first, first + size), PartialAttention(base, some))
        row, places = (x[None].to(device) for x in (prefill.token_ids[some], some))
        with casts, patched_attention(model, patch), rotations(decoder, table):
            decoder(input_ids=row, position_ids=places, use_cache=False)
    return outs
