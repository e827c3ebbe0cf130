"""`Prefill`: the tensors of one standard prefill, for compression to read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import MissingCaptureError, ShapeError, renamed
from gracekv.kernels.rope import Rope
from gracekv.prefill.layer_capture import (
    ADVICE,
    CaptureInfo,
    FiniteChecks,
    LayerCapture,
    check_observation,
    observation_of,
)
from gracekv.prefill.layer_state import LayerState
from gracekv.prefill.observer import LayerObserver, Observer
from gracekv.prefill.spans import PromptSpans

_PART = 1024  # Number of positions whose queries are recomputed at once.


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One sequence after a standard prefill. L layers, G KV heads, H query heads, T tokens.

    Attributes:
        spans: prefix, context, question and tail.
        keys: L tensors [G, T, d], post-RoPE, in the model's dtype; may lie on different devices.
        values: L tensors [G, T, d].
        queries: L tensors [H, n, d], post-RoPE, at `query_positions`.
        query_positions: int64 [n] ascending, on the CPU; the same for all layers. If `with_queries`
            was asked for some layers, the others have n = 0.
        rope: the rotations that made `keys`, for positions 0..T-1; see `rope_of` for one layer.
        unrotated: layers without RoPE.
        softcap: c of the logits c tanh(s q.k / c), or None for s q.k.
        sink_logits: L tensors [H], one logit per query head that joins the softmax without a value;
            empty if there are none.
        other_layers: states of the uncompressed layers after all tokens but the last.
        scale: factor of q . k before the softmax (1/sqrt(d) in most models).
        observed: the result of each observer, [...]; read it with `observation`.
        query_source: computes queries that were not captured, by running their tokens again. Takes
            this prefill, P ascending positions, and layers; returns L tensors [H, P, d], [H, 0, d]
            for other layers. None for a prefill built from tensors. It holds the model, so a pickle
            or a deep copy of the prefill does, too.
        logits: [vocab] of the last position, or None for a prefill built from tensors.
        token_ids: int64 [T], or None for a prefill built from tensors.
        fingerprint: identifies the model and the tokenizer (names, config hash), for saved caches.
        shard: this process's KV heads, which G and H count; by default all.
        seconds: wall-clock seconds of the forward pass ("prefill") and of each observer.

    Needs no model: you can build one from plain tensors to test an algorithm.

    Raises:
        ShapeError: the tensors' shapes do not match.
        NonFiniteError: a tensor holds NaN or infinity.
    """

    spans: PromptSpans
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    query_positions: Tensor
    rope: Rope
    scale: float
    unrotated: frozenset[int] = frozenset()
    softcap: float | None = None
    sink_logits: tuple[Tensor, ...] = ()
    other_layers: tuple[LayerState, ...] = ()
    observed: Mapping[Observer, Tensor] = field(default_factory=dict)
    query_source: Callable[[Prefill, Tensor, Sequence[int]], list[Tensor]] | None = None
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    shard: HeadShard = WHOLE
    seconds: Mapping[str | Observer, float] = field(default_factory=dict)

    kept = renamed("kept", "other_layers")

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.values) == len(self.queries) > 0:
            raise ShapeError(
                f"Prefill takes keys, values and queries of the same number of layers L > 0; got "
                f"{len(self.keys)}, {len(self.values)} and {len(self.queries)}."
            )
        if self.rope.cos.shape[0] < self.spans.length:
            raise ShapeError(
                f"The RoPE table covers {self.rope.cos.shape[0]} positions, the prompt has "
                f"{self.spans.length}."
            )
        checks = FiniteChecks()
        for capture in self:
            capture.check(checks)
        for observer, seen in self.observed.items():
            check_observation(observer, observer.shape(self), seen, checks)
        checks.finish()

    @property
    def layers(self) -> int:
        """L."""
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.keys[0].shape[0]

    @property
    def query_heads(self) -> int:
        """H."""
        return self.queries[0].shape[0]

    @property
    def group(self) -> int:
        """n = H/G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """d."""
        return self.keys[0].shape[-1]

    def rope_of(self, layer: int) -> Rope:
        """The rotations that made the keys of `layer`."""
        cos = self.rope.cos
        return Rope.none(len(cos), cos.device) if layer in self.unrotated else self.rope

    @property
    def entry_dim(self) -> int:
        """Dimension of a key in the cache, see `CaptureInfo.entry_dim`."""
        return self.info.entry_dim

    @property
    def entry_bytes(self) -> int:
        """Bytes of one stored K/V pair."""
        return self.info.entry_bytes

    @property
    def info(self) -> CaptureInfo:
        """Metadata shared by all layers."""
        return CaptureInfo(
            spans=self.spans, layers=self.layers, kv_heads=self.kv_heads,
            query_heads=self.query_heads, head_dim=self.head_dim, dtype=self.keys[0].dtype,
            device=self.keys[0].device, query_positions=self.query_positions, scale=self.scale,
            softcap=self.softcap, token_ids=self.token_ids, shard=self.shard,
        )  # fmt: skip

    def layer(self, number: int) -> LayerCapture:
        """One layer, 0-based; its tensors are shared."""
        rows = {x: self._row(x, seen, number) for x, seen in self.observed.items()}
        observed = {x: self.observed[x][row] for x, row in rows.items() if row is not None}
        states = (self.keys[number], self.values[number], self.queries[number])
        sinks = self.sink_logits[number] if self.sink_logits else None
        return LayerCapture(self.info, number, *states, self.rope_of(number), sinks, observed)

    def _row(self, observer: Observer, result: Tensor, number: int) -> int | None:
        """The row of a layer in what an observer has seen; None where it has none."""
        if result.shape[:1] == (self.layers,):
            return number
        # Others do not have one row a layer.
        if not isinstance(observer, LayerObserver):
            return None
        if type(observer).combine is not LayerObserver.combine:
            return None
        sums = [observer.accumulator(x, self.layers, self.spans) for x in range(number + 1)]
        return None if sums.pop() is None else sum(x is not None for x in sums)

    def __iter__(self) -> Iterator[LayerCapture]:
        """The layers, ascending; a prefill can be iterated again."""
        return map(self.layer, range(self.layers))

    def observation(self, observer: Observer) -> Tensor:
        """The result of `observer`, [...]; raises `MissingCaptureError` if there is none."""
        return observation_of(observer, self.observed)

    def queries_at(self, layer: int, positions: Sequence[int] | Tensor) -> Tensor:
        """[H, P, d] queries of `layer` at absolute `positions`; read-only.

        Positions on a GPU are copied to the host unless all queries are held. Raises
        `MissingCaptureError` if a query was not captured.
        """
        return self.layer(layer).queries_at(positions)

    def with_queries(
        self, positions: Sequence[int] | Tensor, layers: Sequence[int] | None = None
    ) -> Self:
        """A view that holds the queries at `positions`; ask for all positions and layers at once.

        Missing queries are recomputed: the tokens at these positions run through the model again,
        each attending to the captured keys and values up to its own position.

        Args:
            positions: P absolute positions in any order, numbers or int64 [P].
            layers: the layers whose queries are read; by default all.

        Returns:
            `self` if it holds all of them, else a prefill that shares everything else with it.

        Raises `MissingCaptureError` if a position was not captured and there is no
        `query_source`.
        """
        places = torch.as_tensor(positions, dtype=torch.int64, device="cpu").unique()
        at, captured = map(torch.from_numpy, self.info.query_rows(places))
        numbers = range(self.layers) if layers is None else sorted(set(layers))
        count = len(self.query_positions)
        if bool(captured.all()) and all(self.queries[x].shape[1] == count for x in numbers):
            return self
        if older := int((places < self.spans.past).sum()):
            raise MissingCaptureError(
                f"{older} of the requested queries are of tokens that were compressed before this "
                f"passage. Extend with a longer passage, or use a recipe that looks back less far."
            )
        if self.query_source is None:
            raise MissingCaptureError(
                f"Queries at positions {places[~captured][:5].tolist()} were not captured. {ADVICE}"
            )
        queries = self.query_source(self, places[~captured], numbers)
        if bool(captured.any()):
            # Layer by layer into `queries`, to avoid a second copy of all of them.
            for layer in numbers:
                old = self.queries[layer]
                place = captured.to(old.device)
                new = old.new_empty(old.shape[0], len(places), old.shape[2])
                new[:, place] = old[:, at[captured].to(old.device)]
                new[:, ~place] = queries[layer]
                queries[layer] = new
        return self._replace(queries=tuple(queries), query_positions=places)

    def with_observations(self, observers: Iterable[Observer]) -> Self:
        """A view with the observations of `observers` that only read queries, keys and values.

        Raises `MissingCaptureError` if a query was not captured and cannot be computed again.
        """
        some = (x for x in observers if isinstance(x, LayerObserver) and not x.reads)
        new: dict[Observer, Tensor] = {x: self.observe(x) for x in some if x not in self.observed}
        return self._replace(observed={**self.observed, **new}) if new else self

    def observe(self, observer: LayerObserver) -> Tensor:
        """The observation [...] of an observer of queries, keys and values, computed if missing.

        Raises `MissingCaptureError` if a query was not captured and cannot be computed again.
        """
        if observer in self.observed:
            return self.observed[observer]
        region = observer.seen(self.spans)
        sums = [observer.accumulator(x, self.layers, self.spans) for x in range(self.layers)]
        complete = len(self.query_positions) == self.spans.length
        size = min(region.length, 16 * _PART) if complete else _PART
        for part in region.parts(size):
            view = self.with_queries(range(part.start, part.end))
            for layer, accumulator in enumerate(sums):
                if accumulator is not None:
                    accumulator.add(view.layer(layer).run_of(part))
        return observer.combine({i: x.result() for i, x in enumerate(sums) if x is not None})

    def without(self, *observers: type[Observer]) -> Self:
        """A view without the results of observers of these classes."""
        left = {x: seen for x, seen in self.observed.items() if not isinstance(x, observers)}
        return self._replace(observed=left)

    def _replace(self, **fields: object) -> Self:
        """Like `dataclasses.replace`, without checking all tensors again."""
        view = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(view, name, value)
        return view
