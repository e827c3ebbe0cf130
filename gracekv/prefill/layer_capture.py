"""`LayerCapture`: one layer of a captured sequence, the unit that compression works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import MissingCaptureError, NonFiniteError, ShapeError
from gracekv.kernels.rope import Rope
from gracekv.kernels.uploads import on_device
from gracekv.prefill.observer import Observer, TokenRun
from gracekv.prefill.spans import PromptSpans, Region, model_dim

ADVICE = "gracekv.capture(model, prompt, pipeline.needs()) keeps what strategies name in needs()."


class FiniteChecks:
    """Checks for NaN and infinity; those on GPUs are read together, in `finish`."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}

    def add(self, tensor: Tensor, message: str) -> None:
        """Raise `NonFiniteError(message)` if `tensor` [...] is not finite; for GPUs in `finish`."""
        if not tensor.numel():
            return
        # Both are NaN if any element is.
        low, high = tensor.aminmax()
        if tensor.device.type != "cpu":
            self._held.setdefault((tensor.device, tensor.dtype), []).append((message, low, high))
        elif not bool(low.isfinite() & high.isfinite()):
            raise NonFiniteError(message)

    def finish(self) -> None:
        """Raise `NonFiniteError` for the first non-finite tensor. Synchronises with GPUs."""
        for held in self._held.values():
            messages, low, high = zip(*held, strict=True)
            finite = torch.stack([*low, *high]).isfinite().view(2, -1).all(dim=0).tolist()
            for message, fits in zip(messages, finite, strict=True):
                if not fits:
                    raise NonFiniteError(message)
        self._held.clear()


@dataclass(frozen=True, slots=True, eq=False)
class CaptureInfo:
    """Metadata shared by all layers of a captured sequence.

    Attributes:
        spans: prefix, context, question and tail.
        layers: L, number of compressed layers.
        kv_heads: G of this process.
        query_heads: H of this process.
        head_dim: d of the captured keys.
        dtype: dtype of keys and values.
        device: the device of the first layer, on which layers are compared.
        query_positions: int64 [n] ascending, on the CPU: positions of the captured queries.
        scale: factor of q . k before the softmax (1/sqrt(d) in most models).
        softcap: c of the logits c tanh(s q.k / c), or None.
        token_ids: int64 [T], or None for a prefill built from tensors.
        shard: this process's KV heads; by default all.
    """

    spans: PromptSpans
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    query_positions: Tensor
    scale: float
    softcap: float | None = None
    token_ids: Tensor | None = None
    shard: HeadShard = WHOLE

    @property
    def entry_dim(self) -> int:
        """Dimension of a key in the cache: the model's d.

        In the capture of a passage that follows packed entries, keys have 8 more coordinates, which
        hold how many tokens an entry stands for (see `gracekv.prefill.spans`).
        """
        return model_dim(self.head_dim, self.spans.past)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one stored K/V pair."""
        return 2 * self.entry_dim * self.dtype.itemsize

    def query_rows(self, places: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Index of each of `places` (int64 [P], CPU) in `query_positions`, and whether it is in it.

        Returns int64 [P] and bool [P] as NumPy arrays, since torch wakes its threads for 200
        numbers.
        """
        captured, targets = self.query_positions.numpy(), places.numpy()
        at = np.searchsorted(captured, targets).clip(max=max(0, len(captured) - 1))
        return at, captured[at] == targets if len(captured) else np.zeros(len(targets), dtype=bool)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCapture:
    """One layer of a captured sequence: G KV heads, H query heads, T tokens, n captured queries.

    After packed entries (`spans.past` > 0) keys, values and queries have 8 more coordinates than d:
    `[..., : info.entry_dim]` removes them.

    Attributes:
        info: metadata of the whole sequence.
        number: 0-based, among the compressed layers.
        keys: [G, T, d], post-RoPE, in the model's dtype.
        values: [G, T, d].
        queries: [H, n, d], post-RoPE, at `info.query_positions`.
        rope: the rotations that made `keys`.
        sinks: [H] float32 sink logits, which join the softmax without a value, or None.
        observed: the result of each observer for this layer, [...]; read it with `observation`.
    """

    info: CaptureInfo
    number: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    rope: Rope
    sinks: Tensor | None = None
    observed: Mapping[Observer, Tensor] = field(default_factory=dict)

    @property
    def spans(self) -> PromptSpans:
        """Prefix, context, question and tail."""
        return self.info.spans

    @property
    def shard(self) -> HeadShard:
        """This process's KV heads."""
        return self.info.shard

    @property
    def scale(self) -> float:
        """Factor of q . k before the softmax."""
        return self.info.scale

    @property
    def softcap(self) -> float | None:
        """Softcap of the logits, or None."""
        return self.info.softcap

    @property
    def kv_heads(self) -> int:
        """G."""
        return len(self.keys)

    @property
    def query_heads(self) -> int:
        """H."""
        return len(self.queries)

    @property
    def group(self) -> int:
        """n = H/G, query heads per KV head."""
        return len(self.queries) // len(self.keys)

    @property
    def head_dim(self) -> int:
        """d."""
        return self.keys.shape[-1]

    @property
    def softmax_args(self) -> dict[str, Any]:
        """`scale`, `softcap` and `sinks`, arguments of functions that compute attention."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def observation(self, observer: Observer) -> Tensor:
        """The result of `observer` for this layer, [...].

        Raises `MissingCaptureError` if there is none.
        """
        return observation_of(observer, self.observed)

    def queries_at(self, positions: Sequence[int] | Tensor) -> Tensor:
        """[H, P, d] queries at absolute `positions`.

        Raises `MissingCaptureError` if one of them was not captured.
        """
        captured = self.info.query_positions
        if isinstance(positions, Tensor) and positions.device.type != "cpu" and len(captured):
            first, last = captured.numpy()[[0, -1]].tolist()
            # If all positions of a range were captured, no synchronisation is needed.
            if last - first + 1 == len(captured) == self.queries.shape[1]:
                positions = positions.to(self.queries.device)
                return self.queries[:, positions - first if first else positions]
        targets = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        at, has_query = self.info.query_rows(targets)
        if not has_query.all() or self.queries.shape[1] != len(captured):
            raise MissingCaptureError(
                f"Queries of layer {self.number} at positions "
                f"{targets[~has_query][:5].tolist() or 'asked for'} were not captured. {ADVICE}"
            )
        if len(at) and (np.diff(at) == 1).all():
            return self.queries[:, int(at[0]) : int(at[-1]) + 1]
        return self.queries[:, on_device(torch.from_numpy(at), self.queries.device)]

    def run_of(self, region: Region) -> TokenRun:
        """The queries of `region` and the keys that they attend to, as a run for observers.

        Raises `MissingCaptureError` if a query was not captured.
        """
        states = self.queries_at(range(region.start, region.end)), self.keys, self.values
        return TokenRun(region.start, *states, self.rope, **self.softmax_args)

    def check(self, checks: FiniteChecks) -> None:
        """Raise `ShapeError` unless shapes match; add the tensors to `checks` of finite numbers.

        The caller finishes `checks`.
        """
        info, number = self.info, self.number
        keys, values, queries = self.keys, self.values, self.queries
        kv_shape = [info.kv_heads, info.spans.length, info.head_dim]
        if list(keys.shape) != kv_shape or list(values.shape) != kv_shape:
            raise ShapeError(
                f"Keys and values of every layer must be [G, T, d] = {kv_shape} for one sequence; "
                f"layer {number} has {list(keys.shape)} and {list(values.shape)}. Compress the "
                f"sequences of a batch one by one, without padding."
            )
        shape = [len(info.query_positions), info.head_dim]
        if queries.ndim != 3 or len(queries) % info.kv_heads or list(queries.shape[1:]) != shape:
            raise ShapeError(
                f"Queries must be [H, {shape[0]}, {shape[1]}] with H a multiple of G = "
                f"{info.kv_heads}; layer {number} has {list(queries.shape)}."
            )
        for name, tensor in (("keys", keys), ("values", values), ("queries", queries)):
            checks.add(
                tensor,
                f"The {name} of layer {number} hold NaN or infinity. Check the model's weights and "
                f"dtype (float16 overflows in some models: try bfloat16).",
            )


def observation_of(observer: Observer, observed: Mapping[Observer, Tensor]) -> Tensor:
    """The observation of `observer`, [...]; raises `MissingCaptureError` if it was not captured."""
    if (found := observed.get(observer)) is not None:
        return found
    known = ", ".join(sorted(map(repr, observed))) or "none"
    raise MissingCaptureError(f"{observer!r} has not observed this prefill; {known} did. {ADVICE}")


def check_observation(
    observer: Observer, shape: Sequence[int | None], result: Tensor, checks: FiniteChecks
) -> None:
    """Raise `ShapeError` unless `result` [...] has `shape`, where None allows any length."""
    actual = list(result.shape)
    pairs = zip(shape, actual, strict=True)
    if len(shape) != len(actual) or any(size not in (None, other) for size, other in pairs):
        shown = ", ".join("*" if size is None else str(size) for size in shape)
        raise ShapeError(f"{observer!r} must observe a tensor [{shown}] here; it gave {actual}.")
    checks.add(result, f"{observer!r} observed NaN or infinity. Check it and the model's weights.")
