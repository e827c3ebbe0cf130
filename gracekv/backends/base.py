"""The interface of attention to packed ragged entries and a dense tail."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gracekv.cache.coded import Coding
from gracekv.cache.entries import LayerEntries
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's device, dtype, size and codings, which decide whether a backend can read it.

    Attributes:
        device: the device of queries, keys and values.
        dtype: dtype of queries and unquantised entries, or None for any.
        dim: d, the head dimension, or None for any.
        codings: the codings of quantised entries, one per width.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    dim: int | None = None
    codings: tuple[Coding, ...] = ()

    @classmethod
    def of(cls, entries: LayerEntries) -> AttentionSpec:
        """The spec of a layer with these `entries`."""
        return cls(entries.device, entries.dtype, entries.dim, entries.codings)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """Attention of a few new tokens to one layer: to its packed entries and to the tail.

    B rows, the continuations of the layer's S sequences, share the packed entries. Every query sees
    all entries of its row's sequence.

    Attributes:
        query: [B, H, Tq, d].
        packed: the packed entries as returned by the backend's `prepare`; for the reference, the
            `LayerEntries` themselves.
        keys: [B, G, C, d], the tail: the tokens after the packed ones, ending with the queries'
            own. C may be 0.
        values: [B, G, C, d].
        scale: factor of q . k.
        mask: bool (True: seen) or additive float [B or 1, 1, Tq, C], over the tail and added after
            `softcap`. Without one, query i sees the first T - Tq + i + 1 of the tail's T tokens.
        length: int32 or int64 [B] on the query's device, T of each row; places from T on may have
            any finite numbers. Only without a mask. By default T = C.
        rows: int64 [B] on the query's device, the sequence that each row continues. By default
            each sequence is continued by B // S consecutive rows, in order.
        softcap: logit softcap c, or None: logits x become c tanh(x / c) (Gemma 2). An entry stands
            for m tokens of the same capped logit, so log m is added afterwards.
        sink_logits: [H] sink logits (GPT-OSS), or None. A sink acts like a token without a value:
            it only adds to the softmax's denominator.
    """

    query: Tensor
    packed: Any
    keys: Tensor
    values: Tensor
    scale: float
    mask: Tensor | None = None
    length: Tensor | None = None
    rows: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def tail_bias(self) -> Tensor | None:
        """float32 [B or 1, 1, Tq, C] to add to the tail's logits; None if every query sees all."""
        mask, tokens, places = self.mask, self.query.shape[2], self.keys.shape[2]
        if mask is None:
            if tokens == 1 and self.length is None:
                return None
            device = self.query.device
            own = torch.arange(-tokens, 0, device=device)
            last = own + (places if self.length is None else self.length[:, None])
            seen = torch.arange(places, device=device) <= last[..., None]
            mask = seen.unsqueeze(-3) if self.length is not None else seen[None, None]
        if mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape, device=mask.device, dtype=torch.float32)
            return zeros.masked_fill(~mask, -torch.inf)
        return mask.float()

    def rows_of(self, sequences: int) -> list[slice | Tensor]:
        """For each of S `sequences`, the rows that continue it: a slice or int64 [any].

        Raises `ShapeError` if rows and sequences do not match.
        """
        of_row = sequence_of_row(self.rows, len(self.query), sequences, self.query.device)
        if self.rows is not None:
            return [(of_row == sequence).nonzero()[:, 0] for sequence in range(sequences)]
        # Views, without synchronising.
        each = len(of_row) // sequences
        return [slice(each * sequence, each * (sequence + 1)) for sequence in range(sequences)]


def sequence_of_row(
    rows: Tensor | None, batch: int, sequences: int, device: torch.device
) -> Tensor:
    """int64 [B], the sequence that each of `batch` rows continues: `rows`, or in order if None.

    Raises `ShapeError` if batch and sequences do not match.
    """
    check_rows(rows, batch, sequences)
    if rows is not None:
        return rows
    return torch.arange(sequences, device=device).repeat_interleave(batch // sequences)


def check_rows(rows: Tensor | None, batch: int, sequences: int) -> None:
    """Raise `ShapeError` unless `rows` ([B] or None) is valid for a `batch` over `sequences`."""
    if batch % sequences if rows is None else rows.shape != (batch,):
        raise ShapeError(
            f"A cache of {sequences} sequences takes a multiple of as many rows, or `rows` [B]; "
            f"got a batch of {batch} and rows {None if rows is None else list(rows.shape)}."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Softmax attention over a part of the entries, ready to be combined with other parts.

    Attributes:
        output: [B, H, Tq, d], normalised within the part (0 if the part is empty).
        lse: [B, H, Tq] float32, log of the part's summed exponentials (-inf if empty).
    """

    output: Tensor
    lse: Tensor

    @classmethod
    def of_rows(cls, parts: Sequence[Partial]) -> Self:
        """Concatenate the query rows of `parts`."""
        every = (torch.cat([getattr(x, name) for x in parts], dim=2) for name in ("output", "lse"))
        return cls(*every)


def combine(first: Partial, second: Partial, sink_logits: Tensor | None = None) -> Tensor:
    """[B, H, Tq, d]: attention over the union of two disjoint parts.

    o = (e^{lse1} o1 + e^{lse2} o2) / (e^{lse1} + e^{lse2}), with the larger lse subtracted; rows
    that see nothing in either part are 0. With `sink_logits` s [H], e^s is added to the
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
    a, b = ((x / total)[..., None] for x in (a, b))
    return (first.output.float() * a + second.output.float() * b).to(first.output.dtype)


class Backend(Strategy, abc.ABC):
    """Reads a compressed cache during decoding, or chooses the backend that does."""

    # Heads are read independently.
    works_sharded: ClassVar[bool] = True

    @abc.abstractmethod
    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend for a layer of `spec`; resolved once, when a cache is made."""


class AttentionBackend(Backend):
    """Attention of a few new tokens over one packed layer and the tail.

    Softmax statistics are float32 or better. Results of all backends agree within
    `gracekv.testing.attention.TOLERANCES`. It reads quantised entries (`spec.codings`), or
    `obstacle` says that it does not.
    """

    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        return self

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """The reason why a layer of `spec` cannot be read, with a remedy, or None if it can."""
        return None

    def require(self, spec: AttentionSpec) -> None:
        """Raise `BackendUnavailableError` with the `obstacle` if there is one."""
        if (obstacle := self.obstacle(spec)) is not None:
            raise BackendUnavailableError(f"Backend {self.name!r} cannot run. {obstacle}")

    @abc.abstractmethod
    def prepare(self, layer: Any) -> Any:
        """Build the state that the backend keeps for a layer, once per compression.

        `layer` is a `RaggedEntries`, or a `QuantisedEntries` of a coding without `obstacle`.
        """

    def prepare_all(self, layers: Sequence[Any]) -> list[Any]:
        """`prepare` of several layers that lie on one device."""
        return [self.prepare(layer) for layer in layers]

    @abc.abstractmethod
    def held_bytes(self, prepared: Any) -> int:
        """Bytes that `prepared` holds in addition to the packed tensors (indices, copies)."""

    def warm_up(self, prepared: Any, query_heads: int) -> None:
        """Build in advance what a step of one token per sequence needs; by default nothing.

        Afterwards `held_bytes` includes everything held during decoding. `query_heads` is H.
        """

    @abc.abstractmethod
    def __call__(self, step: AttentionStep) -> Tensor:
        """[B, H, Tq, d]: attention to both packed entries and tail.

        Queries that see nothing get 0. With `step.length`, nothing synchronises and shapes do not
        depend on it. Raises `ShapeError` if `step.rows` do not match the sequences.
        """


BACKENDS = Registry("backend", "how decoding reads the ragged cache", Backend)
