"""`Recorder`: collects keys, values and queries from a running model, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.kernels.uploads import on_device
from gracekv.prefill.attention_patch import AttentionCall, own_thread
from gracekv.prefill.model_layers import (
    ModelLayer,
    attention_module,
    output_projection,
    rope_of_table,
    rotating,
)
from gracekv.prefill.observations import Observations
from gracekv.prefill.observer import TokenRun
from gracekv.prefill.partial_attention import PartialAttention
from gracekv.prefill.projection import Projection
from gracekv.prefill.spans import Past, Region, widened
from gracekv.undo import hooked


class Recorder:
    """Keys, values and queries, each written once to its final place; observers see every run.

    Args:
        observations: the observers of the prompt.
        query_positions: int64 [n], ascending, the positions whose queries are held.
        layers: the L compressed layers.

    Layer numbers below count these layers, not the model's.

    Attributes:
        query_positions: as given.
        keys: layer -> [G, T, d].
        values: layer -> [G, T, d].
        queries: layer -> [H, n, d].
        final: [C, D] the decoder's output of the current chunk, if an observer reads it.
        scale: factor of q . k.
        softcap: logit softcap, or None.
        sinks: layer -> [H] float32 sink logits; empty if the model has none.
        table: the rotations of all positions so far. Set it if no model's hooks record them.
    """

    def __init__(
        self, observations: Observations, query_positions: Tensor, layers: Sequence[ModelLayer]
    ) -> None:
        self._spans, self._observations, self._layers = observations.spans, observations, layers
        self.query_positions = query_positions
        self._rotations: list[tuple[Tensor, Tensor]] = []
        self.table: Rope | None = None
        self._chunk = Region(0, 0)
        self._partial: PartialAttention | None = None
        self._past: Past | None = None
        self._spare: list[Tensor] = []
        self._hidden: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.final: Any = None
        self.scale = 0.0
        self.softcap: float | None = None
        self.sinks: dict[int, Tensor] = {}
        self._index = {layer.number: i for i, layer in enumerate(layers)}

    def follow(self, past: Past, rotation: tuple[Tensor, Tensor] | None) -> None:
        """Start the sequence with `past`; `rotation` is cos and sin [1, P, d] of its places.

        `rotation` is None if the rotations are known otherwise.
        """
        self._past = past
        if rotation is not None:
            self._rotations.append(_table(rotation))

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [G, T, d], values [G, T, d] and queries [H, n, d] of a layer.

        Raises `UnsupportedModelError` if the layer did not use the attention function it was given.
        """
        if layer not in self.keys:
            raise UnsupportedModelError(
                f"Layer {self._layers[layer].number} of this model does not call transformers' "
                f"attention function, so gracekv cannot read its keys and queries. Remove any "
                f"replacement of its attention's forward."
            )
        return self.keys[layer], self.values[layer], self.queries[layer]

    def fields(self) -> dict[str, Any]:
        """What was recorded of all layers, as fields of a `Prefill`."""
        keys, values, queries = zip(*map(self.layer, range(len(self._layers))), strict=True)
        sinks = tuple(self.sinks[layer] for layer in sorted(self.sinks))
        still = frozenset(i for i, layer in enumerate(self._layers) if layer.rotation == "none")
        held = {"query_positions": self.query_positions, "spans": self._spans, "scale": self.scale}
        held |= {"softcap": self.softcap, "sink_logits": sinks, "unrotated": still}
        return {**held, "rope": self.rope(), "keys": keys, "values": values, "queries": queries}

    def drop(self, layer: int) -> None:
        """Forget keys, values and queries of a layer; the next layer reuses their memory."""
        self._spare = [place.pop(layer) for place in (self.keys, self.values, self.queries)]

    def begin(self, chunk: Region, partial: PartialAttention | None) -> None:
        """Expect the tokens of `chunk`; if `partial` is None, the model's own attention runs."""
        self._chunk, self._partial = chunk, partial

    def attend(self, call: AttentionCall) -> Any:
        """Record the tensors of a call and attend."""
        if call.layer not in self._index:
            return call.output(call.query, call.key, call.value, call.mask)
        layer, args = self._index[call.layer], call.softmax_args
        self.softcap = args["softcap"]
        if args["sinks"] is not None:
            self.sinks[layer] = args["sinks"]
        query, key, value = self.write(layer, call.query, call.key, call.value, call.scale)
        if self._partial is None:
            output = call.output(query, key, value, call.mask)
        else:
            output = self._partial(call, query, self.keys[layer], self.values[layer])
        run = partial(self._run, call.module, layer, args, query, output[0])
        self._observations.add(layer, run)
        return output

    def write(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the chunk's queries [1, H, C, d], keys and values [1, G, C, d] of a layer.

        Returns them, widened if they follow a `Past`.
        """
        past, self.scale = self._past, scale
        if past is not None:
            query, key, value = widened(query, scale), widened(key), widened(value)
        chunk, is_new = slice(self._chunk.start, self._chunk.end), layer not in self.keys
        for place, new in ((self.keys, key), (self.values, value)):
            self._at(place, layer, new[0], self._spans.length)[:, chunk] = new[0]
        if past is not None and is_new:
            past.write(layer, self.keys[layer], self.values[layer])
        self._keep(layer, query[0])
        return query, key, value

    def _run(
        self, module: Any, layer: int, args: dict[str, Any], queries: Tensor, outputs: Tensor
    ) -> TokenRun:
        """The chunk as a run for observers: `queries` [1, H, C, d] and `outputs` [1, C, H, d]."""
        reads, given = self._observations.reads, {"hidden": self._hidden.pop(layer, None), **args}
        if reads("outputs", layer):
            given["outputs"] = outputs[0].transpose(0, 1)
        if reads("projection", layer):
            given["projection"] = Projection(output_projection(module), outputs[0, 0].numel())
        states = queries[0], self.keys[layer], self.values[layer], self.rope_of(layer)
        return TokenRun(self._chunk.start, *states, **given)

    @contextmanager
    def hooks(self, model: Any) -> Iterator[None]:
        """Hook the model to record tensors that its attention function does not see.

        In the block, a layer with several residual streams raises `UnsupportedModelError`.
        """
        decoder, reads = model.get_decoder(), self._observations.reads

        def rotation(module: Any, args: Any, kwargs: Any) -> None:
            pair = kwargs.get("position_embeddings")
            if pair is None and rotating(self._layers) == "none":
                stream = args[0] if args else kwargs["hidden_states"]
                pair = no_rotation(stream.shape[1], stream.device)
            self._rotations.append(_table(pair))

        def final(module: Any, args: Any, output: Any) -> None:
            self.final = output.last_hidden_state[0]

        with hooked() as hooks:
            for layer in (n for n in range(len(self._layers)) if reads("hidden", n)):

                def before(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                    stream = (args[0] if args else kwargs["hidden_states"])[0]
                    if stream.ndim != 2:
                        raise UnsupportedModelError(
                            f"A {type(module).__name__} gets several residual streams; gracekv "
                            f"reads one [T, D]."
                        )
                    self._hidden[layer] = stream

                block = decoder.layers[self._layers[layer].number]
                hooks.append(block.register_forward_pre_hook(own_thread(before), with_kwargs=True))
            first = attention_module(decoder.layers[self._layers[0].number])
            hooks.append(first.register_forward_pre_hook(own_thread(rotation), with_kwargs=True))
            if reads("final"):
                hooks.append(decoder.register_forward_hook(own_thread(final)))
            yield

    def rope(self) -> Rope:
        """The rotations of all positions so far, as passed to the model's first attention."""
        if self.table is None or len(self.table.cos) < sum(len(x) for x, _ in self._rotations):
            cos, sin = (torch.cat(parts) for parts in zip(*self._rotations, strict=True))
            self._rotations = [(cos, sin)]
            self.table = rope_of_table(cos, sin, rotating(self._layers))
        return self.table

    def rope_of(self, layer: int) -> Rope:
        """The rotations of the keys of `layer`."""
        rope, still = self.rope(), self._layers[layer].rotation == "none"
        return Rope.none(len(rope.cos), rope.cos.device) if still else rope

    def _at(self, place: dict[int, Tensor], layer: int, like: Tensor, size: int) -> Tensor:
        """The layer's tensor [.., size, d], made at the first chunk."""
        if layer not in place:
            shape = (len(like), size, like.shape[2])
            kind = (shape, like.dtype, like.device)
            fits = [i for i, x in enumerate(self._spare) if (x.shape, x.dtype, x.device) == kind]
            place[layer] = self._spare.pop(fits[0]) if fits else like.new_empty(shape)
        return place[layer]

    def _keep(self, layer: int, rows: Tensor) -> None:
        """Store the chunk's queries [H, C, d] at the positions that are held."""
        positions, chunk = self.query_positions, self._chunk
        buffer = self._at(self.queries, layer, rows, len(positions))
        first, last = np.searchsorted(positions.numpy(), [chunk.start, chunk.end]).tolist()
        if last - first == rows.shape[1]:
            buffer[:, first:last] = rows
        elif last > first:
            at = positions[first:last] - chunk.start
            buffer[:, first:last] = rows[:, on_device(at, rows.device)]


def no_rotation(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, 2] that leave keys unchanged."""
    rope = Rope.none(length, device)
    return rope.cos[None], rope.sin[None]


def _table(pair: Any) -> tuple[Tensor, Tensor]:
    """cos and sin [C, d] float32 of one chunk."""
    if not isinstance(pair, tuple) or len(pair) != 2 or any(x.ndim != 3 for x in pair):
        raise UnsupportedModelError(
            "The model does not pass cos and sin [1, T, d] to its attention as "
            "`position_embeddings`, so its rotation cannot be captured."
        )
    return pair[0][0].float(), pair[1][0].float()
