"""`Prefill`: everything that one standard prefill leaves behind for compression to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracekv.errors import MissingCaptureError, NonFiniteError, ShapeError
from gracekv.prefill.spans import PromptSpans
from gracekv.rope import Rope


@dataclass(frozen=True, slots=True)
class Needs:
    """What a strategy reads from a prefill beyond keys and values; `Pipeline.needs` is the union.

    Attributes:
        context_queries: queries of every position at every layer (multi-hop seeds, evidence
            probes, column sums). Takes H/(2G) times the memory of K and V together.
        hidden_depths: relative depths rho; the block input of layer min(floor(rho L), L-1) is kept.
        surprisal: -log p(x_i | x_<i) of every position.
        head_outputs: attention outputs per query head at the question probes, and their
            projected norms.
        last_queries: queries of this many last positions of the prompt, and as many of the
            context, at every layer (observation windows). Much less memory than `context_queries`.
        reconstruction: the most attention that each context token gets while the model repeats the
            context, which is a second pass and takes longer than the first.
        draft: attention of this many greedy answer tokens, each a decoding step on the full cache.
    """

    context_queries: bool = False
    hidden_depths: frozenset[float] = frozenset()
    surprisal: bool = False
    head_outputs: bool = False
    last_queries: int = 0
    reconstruction: bool = False
    draft: int = 0

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            context_queries=self.context_queries or other.context_queries,
            hidden_depths=self.hidden_depths | other.hidden_depths,
            surprisal=self.surprisal or other.surprisal,
            head_outputs=self.head_outputs or other.head_outputs,
            last_queries=max(self.last_queries, other.last_queries),
            reconstruction=self.reconstruction or other.reconstruction,
            draft=max(self.draft, other.draft),
        )


def depth_layers(depths: Sequence[float], layers: int) -> tuple[int, ...]:
    """Relative depths to 0-based layers, min(floor(rho L), L-1), ascending without duplicates.

    Source: Eq. (S1).
    """
    return tuple(sorted({min(math.floor(rho * layers), layers - 1) for rho in depths}))


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One sequence after a standard prefill. L layers, G KV heads, H query heads, T tokens.

    Attributes:
        spans: prefix, context, question and tail.
        keys: L tensors [G, T, d], post-RoPE, in the model's dtype; may lie on different devices.
        values: L tensors [G, T, d].
        queries: L tensors [H, n, d], post-RoPE, of the positions `query_positions`.
        query_positions: int64 [n] ascending, on the CPU; the same for all layers.
        rope: the rotations that made `keys`, for positions 0..T-1.
        scale: factor of q . k before the softmax (1/sqrt(d) in most models).
        hidden: layer -> block-input residual stream [T, D] (empty if not captured).
        surprisal: [T] float32, position 0 holds 0; None if not captured.
        head_outputs: [L, H, P_q, d] attention outputs before the output projection at
            `spans.question_probes()`; None if not captured.
        projected_norms: [L, G, P_q] float32, ||sum_{h in H(g)} W_O^{l,h} o_u^{l,h}||_2.
        projection_norms: [L, H] float32, ||W_O^{l,h}||_F.
        reconstruction: [L, G, N_ctx] float32, the most attention that each context token got in the
            second pass; None if there was none.
        draft: [L, G, S, N_ctx] float32, attention that the answer's S first tokens, drafted
            greedily, pay each context token; None if nothing was drafted.
        logits: [vocab] of the last position, or None for a prefill built from tensors.
        token_ids: int64 [T], or None for a prefill built from tensors.
        fingerprint: identifies model and tokenizer (names, config hash), for saved caches.
        seconds: wall seconds of the capture by part: "prefill" is the forward pass, the others
            are what the capture added after it ("surprisal", "projections", the second pass,
            "reconstruction", and the "draft").

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
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    surprisal: Tensor | None = None
    head_outputs: Tensor | None = None
    projected_norms: Tensor | None = None
    projection_norms: Tensor | None = None
    reconstruction: Tensor | None = None
    draft: Tensor | None = None
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.values) == len(self.queries) > 0:
            raise ShapeError(
                f"Prefill takes keys, values and queries of the same L > 0 layers; got "
                f"{len(self.keys)}, {len(self.values)} and {len(self.queries)}."
            )
        heads, dim = self.keys[0].shape[0], self.keys[0].shape[-1]
        kv_shape = (heads, self.spans.length, dim)
        for layer, (k, v, q) in enumerate(zip(self.keys, self.values, self.queries, strict=True)):
            if tuple(k.shape) != kv_shape or tuple(v.shape) != kv_shape:
                raise ShapeError(
                    f"Keys and values of every layer must be [G, T, d] = {list(kv_shape)} for one "
                    f"sequence; layer {layer} has {list(k.shape)} and {list(v.shape)}. Compress "
                    f"the sequences of a batch one by one, without padding."
                )
            if (
                q.ndim != 3
                or q.shape[0] % heads
                or tuple(q.shape[1:]) != (len(self.query_positions), dim)
            ):
                raise ShapeError(
                    f"Queries must be [H, {len(self.query_positions)}, {dim}] with H a multiple of "
                    f"G = {heads}; layer {layer} has {list(q.shape)}."
                )
            for name, tensor in (("keys", k), ("values", v), ("queries", q)):
                if not _is_finite(tensor):
                    raise NonFiniteError(
                        f"The {name} of layer {layer} hold NaN or infinity. Check the model's "
                        f"weights and dtype (float16 overflows in some models: try bfloat16)."
                    )
        if self.rope.cos.shape[0] < self.spans.length:
            raise ShapeError(
                f"The RoPE table covers {self.rope.cos.shape[0]} positions, the prompt has "
                f"{self.spans.length}."
            )

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
    def entry_bytes(self) -> int:
        """Bytes of one K/V pair."""
        return 2 * self.head_dim * self.keys[0].element_size()

    def seconds_for(self, needs: Needs) -> dict[str, float]:
        """Seconds of the forward pass and of what was captured for `needs`.

        A prefill that serves several pipelines holds more; each counts only its own parts.
        """
        captured = {
            "surprisal": needs.surprisal,
            "projections": needs.head_outputs,
            "reconstruction": needs.reconstruction,
            "draft": needs.draft > 0,
        }
        return {part: taken for part, taken in self.seconds.items() if captured.get(part, True)}

    def queries_at(self, layer: int, positions: Sequence[int] | Tensor) -> Tensor:
        """[H, P, d] queries of `layer` at absolute `positions`.

        Raises `MissingCaptureError` if one of them was not captured.
        """
        wanted = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        at = torch.searchsorted(self.query_positions, wanted).clamp(
            max=len(self.query_positions) - 1
        )
        missing = wanted[self.query_positions[at] != wanted]
        if len(missing):
            raise MissingCaptureError(
                f"Queries at positions {missing[:5].tolist()} were not captured. Capture for the "
                f"pipeline that you run: gracekv.capture(model, prompt, needs=pipeline.needs())."
            )
        return self.queries[layer][:, at.to(self.queries[layer].device)]

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


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a boolean copy of the tensor: a NaN or an infinity survives a sum of
    # absolute values; float64 because long float16 sums would overflow by themselves.
    return bool(torch.isfinite(tensor.abs().sum(dtype=torch.float64)))
