"""`Prefill`: everything that one standard prefill leaves behind for compression to read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gracekv.distributed.head_shard import HeadShard
from gracekv.errors import MissingCaptureError
from gracekv.kernels.rope import Rope
from gracekv.prefill.block_replay import BlockReplaySpec
from gracekv.prefill.kept import KeptLayer
from gracekv.prefill.needs import Needs, depth_layers
from gracekv.prefill.query_moments import QueryMoments
from gracekv.prefill.spans import PromptSpans, Region
from gracekv.prefill.tensor_checks import check_tensors

_PART = 1024  # Positions whose queries are computed again at once.


class QuerySource(Protocol):
    """Computes queries that were not captured."""

    def __call__(self, prefill: Prefill, positions: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """L tensors [H, P, d] for P ascending positions; [H, 0, d] for layers not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One sequence after a standard prefill. L layers, G KV heads, H query heads, T tokens.

    Attributes:
        spans: prefix, context, question and tail.
        keys: L tensors [G, T, d], post-RoPE, in the model's dtype; may lie on different devices.
        values: L tensors [G, T, d].
        queries: L tensors [H, n, d], post-RoPE, of the positions `query_positions`.
        query_positions: int64 [n] ascending, on the CPU; the same for all layers.
            A view by `with_queries` for some layers has n = 0 in the others.
        rope: the rotations that made `keys`, for positions 0..T-1; of a layer: `rope_of`.
        unrotated: layers without RoPE.
        softcap: c of the logits c tanh(s q.k / c) that the model computes; None: they are s q.k.
        sink_logits: L tensors [H], a logit of each query head that joins the softmax without a
            value; empty if there are none.
        kept: what the model's other layers hold after all tokens but the last.
        scale: factor of q . k before the softmax (1/sqrt(d) in most models).
        added: how many of the d coordinates are those of `Past`, which entries are stored without.
        hidden: layer -> block-input residual stream [T, D] (empty if not captured).
        surprisal: [T] float32, position 0 holds 0; None if not captured.
        head_outputs: [L, H, P_q, d] attention outputs before the output projection at
            `spans.question_probes()`; None if not captured.
        projected_norms: [L, G, P_q] float32, ||sum_{h in H(g)} W_O^{l,h} o_u^{l,h}||_2.
        projection_norms: [L, H] float32, ||W_O^{l,h}||_F.
        written_norms: [L, G, T] float32, mean over a group of ||W_O^{l,h} v_t||_1; None if not
            captured.
        reconstruction: [L, G, N_ctx] float32, the most attention that each context token got in the
            second pass; None if there was none.
        draft: [L, G, S, N_ctx] float32, attention that the answer's S first tokens, drafted
            greedily, pay each context token; None if nothing was drafted.
        column_sums: [L, H, T] float32, the attention that each position receives from all queries;
            None if not captured.
        query_moments: statistics of the queries before rotation; None if not captured.
        block_replays: sums [L, G, T] float32 by what they are, see `BlockReplaySpec`; empty if not
            captured.
        query_source: computes queries that were not captured, by running their tokens once more;
            None for a prefill built from tensors.
        logits: [vocab] of the last position, or None for a prefill built from tensors.
        token_ids: int64 [T], or None for a prefill built from tensors.
        fingerprint: identifies model and tokenizer (names, config hash), for saved caches.
        shard: which of all processes' KV heads these are, which G and H count; None: all.
        seconds: wall seconds by part: "prefill" is the forward pass, the others are what was added
            to it ("surprisal", "query_sums", "projections", "reconstruction", "draft").

    Needs no model: build one from plain tensors to test an algorithm.

    Raises:
        ShapeError: the tensors do not fit one another.
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
    added: int = 0
    kept: tuple[KeptLayer, ...] = ()
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    surprisal: Tensor | None = None
    head_outputs: Tensor | None = None
    projected_norms: Tensor | None = None
    projection_norms: Tensor | None = None
    written_norms: Tensor | None = None
    reconstruction: Tensor | None = None
    draft: Tensor | None = None
    column_sums: Tensor | None = None
    query_moments: QueryMoments | None = None
    block_replays: Mapping[BlockReplaySpec, Tensor] = field(default_factory=dict)
    query_source: QuerySource | None = None
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    shard: HeadShard | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_tensors(self)

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

    @property
    def entry_dim(self) -> int:
        """Numbers of a stored key: d without the coordinates that `Past` adds."""
        return self.head_dim - self.added

    def rope_of(self, layer: int) -> Rope:
        """The rotations that made the keys of `layer`."""
        table = self.rope.cos
        return Rope.none(len(table), table.device) if layer in self.unrotated else self.rope

    def logits_of(self, layer: int) -> dict[str, Any]:
        """What `gracekv.kernels.logits` makes of the products of queries and keys of `layer`."""
        sinks = self.sink_logits[layer] if self.sink_logits else None
        return {"softcap": self.softcap, "sinks": sinks}

    @property
    def entry_bytes(self) -> int:
        """Bytes of one K/V pair as it is stored."""
        return 2 * self.entry_dim * self.keys[0].element_size()

    def seconds_for(self, needs: Needs) -> dict[str, float]:
        """Seconds of the forward pass and of what was captured for `needs`.

        A prefill that serves several pipelines holds more; each counts only its own parts.
        """
        captured = {
            "surprisal": needs.surprisal,
            "projections": needs.head_outputs or needs.written_norms,
            "reconstruction": needs.reconstruction,
            "draft": needs.draft > 0,
            "query_sums": needs.sums_queries,
        }
        return {part: taken for part, taken in self.seconds.items() if captured.get(part, True)}

    def queries_at(self, layer: int, positions: Sequence[int] | Tensor) -> Tensor:
        """[H, P, d] queries of `layer` at absolute `positions`.

        Raises `MissingCaptureError` if one of them was not captured.
        """
        wanted = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        at, held = self._rows(wanted)
        queries = self.queries[layer]
        if not bool(held.all()) or queries.shape[1] != len(self.query_positions):
            raise MissingCaptureError(
                f"Queries of layer {layer} at positions {wanted[~held][:5].tolist() or 'asked for'}"
                f" were not captured. Capture for the pipeline that you run: "
                f"gracekv.capture(model, prompt, needs=pipeline.needs())."
            )
        return queries[:, at.to(queries.device)]

    def _rows(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Where `query_positions` holds each of `wanted`, int64 [P], and whether, bool [P]."""
        if not len(self.query_positions):
            return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
        at = torch.searchsorted(self.query_positions, wanted)
        at = at.clamp(max=len(self.query_positions) - 1)
        return at, self.query_positions[at] == wanted

    def with_queries(
        self, positions: Sequence[int] | Tensor, layers: Sequence[int] | None = None
    ) -> Self:
        """A view that holds the queries at `positions`; ask once for all positions and layers.

        What was not captured is computed again: the tokens of the missing positions run through the
        model once more, each attending to the captured keys and values up to its own position.

        Args:
            positions: P absolute ones, in any order: numbers, or int64 [P].
            layers: which layers' queries are read; None: all.

        Returns:
            `self` if it holds them all, else a prefill that shares everything else with it.

        Raises `MissingCaptureError` if a position was not captured and there is no
        `query_source`.
        """
        wanted = torch.as_tensor(positions, dtype=torch.int64, device="cpu").unique()
        at, held = self._rows(wanted)
        if bool(held.all()) and all(
            self.queries[x].shape[1] == len(self.query_positions)
            for x in (range(self.layers) if layers is None else layers)
        ):
            return self
        if bool((wanted < self.spans.past).any()):
            raise MissingCaptureError(
                f"{int((wanted < self.spans.past).sum())} of the queries asked for are of tokens "
                f"that were compressed before this passage. Extend by a longer passage, or use a "
                f"recipe that looks less far back."
            )
        if self.query_source is None:
            raise MissingCaptureError(
                f"Queries at positions {wanted[~held][:5].tolist()} were not captured. Capture for "
                f"the pipeline that you run: gracekv.capture(model, prompt, "
                f"needs=pipeline.needs())."
            )
        chosen = range(self.layers) if layers is None else sorted(set(layers))
        found = self.query_source(self, wanted[~held], chosen)
        if bool(held.any()):
            # Layer by layer into `found`, so that no second copy of all of them is made.
            for layer in chosen:
                own = self.queries[layer]
                place = held.to(own.device)
                both = own.new_empty(own.shape[0], len(wanted), own.shape[2])
                both[:, place] = own[:, at[held].to(own.device)]
                both[:, ~place] = found[layer]
                found[layer] = both
        return self._replaced(queries=tuple(found), query_positions=wanted)

    def query_parts(self) -> Iterator[tuple[Self, Region]]:
        """Views that together hold the queries of all positions, each of a run of positions."""
        length = self.spans.length
        if len(self.query_positions) == length:
            yield self, Region(0, length)
            return
        for first in range(0, length, _PART):
            part = Region(first, min(first + _PART, length))
            yield self.with_queries(range(part.start, part.end)), part

    def without(self, *names: str) -> Self:
        """Shares everything but the tensors of these fields ("hidden", "queries", ...)."""
        empty: dict[str, object] = dict.fromkeys(names)
        if "hidden" in empty:
            empty["hidden"] = {}
        if "queries" in empty:
            empty["queries"] = tuple(x[:, :0].clone() for x in self.queries)
            empty["query_positions"] = self.query_positions[:0]
        return self._replaced(**empty)

    def _replaced(self, **fields: object) -> Self:
        """As `dataclasses.replace`, without checking all tensors once more."""
        view = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(view, name, value)
        return view

    def hidden_at(self, depths: Sequence[float]) -> list[Tensor]:
        """Block inputs [T, D] of the layers at relative `depths`, ascending, without duplicates.

        Raises `MissingCaptureError` if one was not captured.
        """
        layers = depth_layers(depths, self.layers)
        missing = [layer for layer in layers if layer not in self.hidden]
        if missing:
            raise MissingCaptureError(
                f"Hidden states of layers {missing} were not captured; there are "
                f"{sorted(self.hidden) or 'none'}. Capture for the pipeline that you run: "
                f"gracekv.capture(model, prompt, needs=pipeline.needs())."
            )
        return [self.hidden[layer] for layer in layers]
