"""The interface of attention over a packed ragged part and a dense tail."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gracekv.backends.attention_spec import AttentionSpec
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Softmax attention over a part of the entries, ready to be combined with other parts.

    Attributes:
        output: [B, H, Tq, d], normalised inside the part (0 where the part is empty).
        lse: [B, H, Tq] float32, log of the part's summed exponentials (-inf where empty).
    """

    output: Tensor
    lse: Tensor


def combine(first: Partial, second: Partial, sink_logits: Tensor | None = None) -> Tensor:
    """[B, H, Tq, d]: attention over the union of two disjoint parts.

    o = (e^{lse1} o1 + e^{lse2} o2) / (e^{lse1} + e^{lse2}), with the larger lse subtracted; a row
    that sees nothing in either part gives 0. With `sink_logits` s [H], e^s is added to the
    denominator. Source: flash decoding (Dao et al., 2023).
    """
    top = torch.maximum(first.lse, second.lse)
    if sink_logits is not None:
        sink = sink_logits.float()[:, None]
        top = torch.maximum(top, sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    a, b = (first.lse - top).exp(), (second.lse - top).exp()
    total = a + b if sink_logits is None else a + b + (sink - top).exp()
    total = total.clamp(min=torch.finfo(torch.float32).tiny)
    mixed = (
        first.output.float() * (a / total)[..., None]
        + second.output.float() * (b / total)[..., None]
    )
    return mixed.to(first.output.dtype)


def united(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint parts, itself a part."""
    return Partial(combine(first, second), torch.logaddexp(first.lse, second.lse))


def without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None: a backend that does not know one is not given it."""
    return {name: x for name, x in options.items() if x is not None}


def sequence_of_row(
    rows: Tensor | None, batch: int, sequences: int, device: torch.device
) -> Tensor:
    """int64 [B], the sequence that each of `batch` rows continues: `rows`, or in order if None.

    Raises `ShapeError` if the batch does not fit.
    """
    if rows is None and batch % sequences == 0:
        return torch.arange(sequences, device=device).repeat_interleave(batch // sequences)
    if rows is None or rows.shape != (batch,):
        raise ShapeError(
            f"A cache of {sequences} sequences takes a multiple of as many rows, or `rows` of "
            f"shape [B]; got a batch of {batch} and rows "
            f"{None if rows is None else list(rows.shape)}."
        )
    return rows


class Backend(Strategy, abc.ABC):
    """What reads a compressed cache while decoding: a backend, or a rule that chooses one."""

    # Heads are read one by one.
    works_sharded: ClassVar[bool] = True

    @abc.abstractmethod
    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend for a layer of `spec`; a cache resolves it once, when it is made."""


class AttentionBackend(Backend):
    """Attention of a few new tokens over one packed layer and the tail.

    B rows, the continuations of the layer's S sequences, share the packed part. `rows` int64 [B],
    on the query's device, says which sequence each of them continues; None: the sequences in
    order, each by B // S consecutive rows. Softmax statistics are float32 or better. Results of
    all backends agree within `gracekv.testing.attention.TOLERANCES`.

    Attributes:
        reads_codes: whether it reads quantised entries.
        takes_softcap: whether it caps logits.
        takes_sink_logits: whether it adds a logit of each query head to the softmax's denominator.

    What a backend does not take it is never given, so it need not have the arguments.
    """

    reads_codes: ClassVar[bool] = False
    takes_softcap: ClassVar[bool] = False
    takes_sink_logits: ClassVar[bool] = False

    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        return self

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """Why a layer of `spec` cannot be read, and what to do about it; None if it can.

        A class that adds reasons of its own calls this first.
        """
        others = "Use backend 'auto', 'sdpa' or 'eager'"
        if spec.codings and not self.reads_codes:
            return f"It does not read quantised entries. {others}, or precision 'full'."
        if spec.softcap and not self.takes_softcap:
            return f"It does not cap logits, as this model's attention does. {others}."
        if spec.sink_logits and not self.takes_sink_logits:
            return f"It takes no sink logits, which this model's attention has. {others}."
        return None

    def require(self, spec: AttentionSpec) -> None:
        """Raise `BackendUnavailableError` with the `obstacle` if there is one."""
        obstacle = self.obstacle(spec)
        if obstacle is not None:
            raise BackendUnavailableError(f"Backend {self.name!r} cannot run. {obstacle}")

    @abc.abstractmethod
    def prepare(self, layer: Any) -> Any:
        """What the backend holds for a layer, built once per compression.

        `layer` is a `RaggedLayer`, or a `QuantisedLayer` of a coding without `obstacle`.
        """

    @abc.abstractmethod
    def held_bytes(self, prepared: Any) -> int:
        """Bytes that `prepared` holds beside the packed tensors (indices, copies)."""

    def warm_up(self, prepared: Any, query_heads: int) -> None:
        """Build ahead what a step of one token for each sequence needs; nothing by default.

        `held_bytes` then says what decoding holds. `query_heads` is H.
        """

    @abc.abstractmethod
    def packed(
        self,
        query: Tensor,
        prepared: Any,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
    ) -> Partial:
        """Attention of query [B, H, Tq, d] to all packed entries of each row's sequence.

        Log multiplicities are added to the logits, after `softcap` (see `__call__`).
        """

    @abc.abstractmethod
    def tail(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        softcap: float | None = None,
    ) -> Partial:
        """Attention to the tail.

        Args:
            query: [B, H, Tq, d].
            keys: [B, G, S, d], the new tokens, the queries' own included at the end.
            values: [B, G, S, d].
            mask: bool or additive float [B, 1, Tq, S], or None: query i sees the tail's first
                S - Tq + i + 1 tokens.
            scale: factor of q . k.
            softcap: see `__call__`; the mask is added after it.
        """

    def __call__(
        self,
        query: Tensor,
        prepared: Any,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """[B, H, Tq, d]: attention to packed part and tail together.

        Args:
            query: [B, H, Tq, d].
            prepared: from `prepare`.
            keys: [B, G, S, d] of the tail.
            values: [B, G, S, d].
            mask: see `tail`.
            scale: factor of q . k.
            rows: int64 [B], or None.
            softcap: c; logits x become c tanh(x / c) (Gemma 2). An entry stands for m tokens of
                the same capped logit, so log m is added afterwards.
            sink_logits: [H], of a token without a value that each query head sees besides all
                others (GPT-OSS): part of the softmax's denominator alone.
        """
        cap = without_none(softcap=softcap)
        packed = self.packed(query, prepared, scale, rows, **cap)
        tail = self.tail(query, keys, values, mask, scale, **cap)
        return combine(packed, tail, sink_logits)

    def decode(
        self,
        query: Tensor,
        prepared: Any,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """[B, H, Tq, d]: like calling, over tail buffers whose used length lies on the device.

        Nothing waits for the device, and shapes do not depend on `length`.

        Args:
            query: [B, H, Tq, d].
            prepared: from `prepare`.
            keys: [B, G, C, d]; places from `length` on may hold any finite numbers.
            values: [B, G, C, d].
            length: int32 or int64 [B], tokens in each row's tail, the queries' own included.
            scale: factor of q . k.
            rows: int64 [B], or None.
            softcap: see `__call__`.
            sink_logits: [H], see `__call__`.
        """
        query_places = torch.arange(-query.shape[2], 0, device=length.device) + length[:, None]
        places = torch.arange(keys.shape[2], device=length.device)
        seen = places <= query_places[..., None]
        options = without_none(softcap=softcap, sink_logits=sink_logits)
        return self(query, prepared, keys, values, seen[:, None], scale, rows, **options)


BACKENDS: Registry[Backend] = Registry("backend", "how decoding reads the ragged cache")
Backend.registry = BACKENDS
