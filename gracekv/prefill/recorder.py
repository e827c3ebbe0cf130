"""What the attention function and the hooks of a capture write down, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.linalg import full_float32
from gracekv.kernels.rope import Rope
from gracekv.prefill.block_replay import BlockReplaySpec, BlockReplaySums
from gracekv.prefill.column_sums import add_column_sums
from gracekv.prefill.model_layers import ModelLayer, attention_module, rope_of_table, rotating
from gracekv.prefill.needs import Needs, depth_layers
from gracekv.prefill.partial_attention import PartialAttention
from gracekv.prefill.past import Past, widened
from gracekv.prefill.query_moments import QueryMoments, QuerySums
from gracekv.prefill.spans import PromptSpans, Region


class Recorder:
    """Keys, values and what `needs` asks for; every tensor is written once, into its final place.

    Args:
        spans: of the prompt.
        needs: what to keep.
        query_positions: int64 [n] ascending: whose queries are held.
        layers: the L that are compressed.

    Numbers of layers below count these, not the model's.

    Attributes:
        keys: layer -> [G, T, d].
        values: layer -> [G, T, d].
        queries: layer -> [H, n, d].
        outputs: layer -> [H, P_q, d] attention outputs at the question probes.
        hidden: layer -> [T, D].
        column_sums: layer -> [H, T].
        final: [C, D] the decoder's output of the current chunk.
        scale: of the logits.
        softcap: of the logits; None: none.
        sinks: layer -> [H] float32, sink logits; empty: none.
        seconds: spent on sums over queries.
    """

    def __init__(
        self,
        spans: PromptSpans,
        needs: Needs,
        query_positions: Tensor,
        layers: Sequence[ModelLayer],
    ) -> None:
        self._spans, self._needs, self._layers = spans, needs, layers
        self._positions = query_positions
        self._probes = torch.tensor(spans.question_probes())
        self._moments = [QuerySums() for _ in layers]
        self._replays = {
            replay: [BlockReplaySums(replay, spans) for _ in layers]
            for replay in needs.block_replays
        }
        self._rotations: list[tuple[Tensor, Tensor]] = []
        self._rope: Rope | None = None
        self._chunk = Region(0, 0)
        self._partial: PartialAttention | None = None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}
        self.column_sums: dict[int, Tensor] = {}
        self.final: Any = None
        self.scale, self.seconds = 0.0, 0.0
        self.softcap: float | None = None
        self.sinks: dict[int, Tensor] = {}
        self._index = {layer.number: i for i, layer in enumerate(layers)}

    def follow(self, past: Past, rotation: tuple[Tensor, Tensor]) -> None:
        """The sequence begins with `past`; `rotation` is cos and sin [1, P, d] of its places."""
        for place, known in ((self.keys, past.keys), (self.values, past.values)):
            for layer, states in enumerate(known):
                whole = self._at(place, layer, states, 1, self._spans.length)
                whole[:, : past.places] = states
        self._rotations.append(_table(rotation))

    def begin(self, chunk: Region, partial: PartialAttention | None) -> None:
        """The tokens of `chunk` run next; without `partial` by the model's own attention."""
        self._chunk, self._partial = chunk, partial

    def wrap(self, stock: Any) -> Any:
        """The attention function of the capture; `stock` is the model's own."""

        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            """query [1, H, C, d], key and value [1, G, C, d]."""
            if module.layer_idx not in self._index:
                return stock(module, query, key, value, mask, **kwargs)
            layer, self.scale = self._index[module.layer_idx], float(kwargs["scaling"])
            self.softcap = kwargs.get("softcap")
            if kwargs.get("s_aux") is not None:
                self.sinks[layer] = kwargs["s_aux"].detach().float()
            dim = query.shape[-1]
            wide = self.keys[layer].shape[-1] if layer in self.keys else dim
            query = widened(query, wide, 1 / self.scale)
            key, value = widened(key, wide), widened(value, wide)
            chunk = slice(self._chunk.start, self._chunk.end)
            for place, new in ((self.keys, key), (self.values, value)):
                self._at(place, layer, new[0], 1, self._spans.length)[:, chunk] = new[0]
            if self._partial is None:
                output = stock(module, query, key, value, mask, **kwargs)
            else:
                output, *rest = self._partial(
                    stock, module, query, self.keys[layer], self.values[layer], **kwargs
                )
                output = output[..., :dim], *rest
            self._keep(self.queries, layer, query[0], self._positions)
            if self._needs.head_outputs:
                self._keep(self.outputs, layer, output[0][0].transpose(0, 1), self._probes)
            if self._needs.sums_queries:
                self._add(layer, query[0])
            return output

        return attention

    @contextmanager
    def hooks(self, model: Any) -> Iterator[None]:
        """Record what the attention function does not see.

        Inside, a layer with several residual streams raises `UnsupportedModelError`.
        """
        decoder, needs = model.get_decoder(), self._needs

        def rotation(module: Any, args: Any, kwargs: Any) -> None:
            pair = kwargs.get("position_embeddings")
            if pair is None and rotating(self._layers) == "none":
                stream = args[0] if args else kwargs["hidden_states"]
                pair = no_rotation(stream.shape[1], stream.device)
            self._rotations.append(_table(pair))

        def final(module: Any, args: Any, output: Any) -> None:
            self.final = output.last_hidden_state[0]

        with ExitStack() as undo:
            for layer in depth_layers(sorted(needs.hidden_depths), len(self._layers)):

                def block_input(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                    stream = (args[0] if args else kwargs["hidden_states"])[0]
                    if stream.ndim != 2:
                        raise UnsupportedModelError(
                            f"A {type(module).__name__} is given several residual streams; gracekv "
                            f"reads one [T, D]."
                        )
                    place = self._at(self.hidden, layer, stream, 0, self._spans.length)
                    place[self._chunk.start : self._chunk.end] = stream

                block = decoder.layers[self._layers[layer].number]
                hook = block.register_forward_pre_hook(block_input, with_kwargs=True)
                undo.callback(hook.remove)
            first = attention_module(decoder.layers[self._layers[0].number])
            hook = first.register_forward_pre_hook(rotation, with_kwargs=True)
            undo.callback(hook.remove)
            if needs.surprisal:
                undo.callback(decoder.register_forward_hook(final).remove)
            yield

    def rope(self) -> Rope:
        """The table of the positions so far, as the model passed it to its first attention."""
        if self._rope is None or len(self._rope.cos) < sum(len(x) for x, _ in self._rotations):
            cos, sin = (torch.cat(parts) for parts in zip(*self._rotations, strict=True))
            self._rope = rope_of_table(cos, sin, rotating(self._layers))
        return self._rope

    def _rope_of(self, layer: int, cos: Tensor, sin: Tensor) -> Rope:
        return rope_of_table(cos, sin, self._layers[layer].rotation)

    def unrotated(self) -> frozenset[int]:
        """Layers without RoPE."""
        return frozenset(i for i, layer in enumerate(self._layers) if layer.rotation == "none")

    def _logits(self, layer: int) -> dict[str, Any]:
        return {"softcap": self.softcap, "sinks": self.sinks.get(layer)}

    def query_moments(self) -> QueryMoments | None:
        """What was added up, or None if it was not asked for."""
        if self._needs.query_moments is None:
            return None
        seen = self._counted(self._needs.query_moments)
        means, covariances = zip(*(sums.moments() for sums in self._moments), strict=True)
        return QueryMoments(seen.start, seen.end, means, covariances)

    def block_replays(self) -> dict[BlockReplaySpec, Tensor]:
        """What was added up, [L, G, T] each, on the first layer's device."""
        found = {}
        for replay, layers in self._replays.items():
            totals = [sums.total for sums in layers if sums.total is not None]
            found[replay] = torch.stack([total.to(totals[0].device) for total in totals])
        return found

    def _counted(self, start: int) -> Region:
        """Positions whose queries count; of a context that starts later at least one."""
        return Region(min(start, self._spans.context_end - 1), self._spans.context_end)

    def _at(
        self, place: dict[int, Tensor], layer: int, like: Tensor, axis: int, size: int
    ) -> Tensor:
        """The layer's tensor, made at the first chunk; `size` long at `axis`, else as `like`."""
        if layer not in place:
            shape = list(like.shape)
            shape[axis] = size
            place[layer] = like.new_empty(shape)
        return place[layer]

    def _keep(self, place: dict[int, Tensor], layer: int, rows: Tensor, positions: Tensor) -> None:
        """Write the rows [H, C, d] of this chunk that are at `positions`."""
        kept = self._at(place, layer, rows, 1, len(positions))
        edges = torch.tensor([self._chunk.start, self._chunk.end])
        first, last = torch.searchsorted(positions, edges).tolist()
        if last - first == rows.shape[1]:
            kept[:, first:last] = rows
        elif last > first:
            at = positions[first:last] - self._chunk.start
            kept[:, first:last] = rows[:, at.to(rows.device)]

    def _add(self, layer: int, queries: Tensor) -> None:
        """Add the queries [H, C, d] of this chunk to the layer's sums."""
        started = _now(queries.device)
        with full_float32():
            if self._needs.column_sums:
                if layer not in self.column_sums:
                    size = (len(queries), self._spans.length)
                    self.column_sums[layer] = queries.new_zeros(size, dtype=torch.float32)
                add_column_sums(
                    self.column_sums[layer],
                    queries,
                    self.keys[layer],
                    self._chunk.start,
                    self.scale,
                    **self._logits(layer),
                )
            if self._needs.query_moments is not None:
                seen = self._counted(self._needs.query_moments)
                first, last = max(seen.start, self._chunk.start), min(seen.end, self._chunk.end)
                if first < last:
                    offset = self._chunk.start
                    self._moments[layer].add(
                        queries[:, first - offset : last - offset],
                        self._rope_of(layer, *self._rotations[-1]),
                        first - offset,
                    )
            for layers in self._replays.values():
                keys, rope = self.keys[layer], self.rope()
                if layer in self.unrotated():
                    rope = Rope.none(len(rope.cos), rope.cos.device)
                layers[layer].add(
                    queries, self._chunk.start, keys, rope, self.scale, **self._logits(layer)
                )
        self.seconds += _now(queries.device) - started


def no_rotation(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, 2] that leave keys as they are."""
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
