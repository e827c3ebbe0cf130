"""The interface of attention over a packed ragged part and a dense tail."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gracekv.cache.coded import Coding
from gracekv.errors import ShapeError
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


def combine(first: Partial, second: Partial) -> Tensor:
    """[B, H, Tq, d]: attention over the union of two disjoint parts.

    o = (e^{lse1} o1 + e^{lse2} o2) / (e^{lse1} + e^{lse2}), with the larger lse subtracted; a row
    that sees nothing in either part gives 0. Source: flash decoding (Dao et al., 2023).
    """
    top = torch.maximum(first.lse, second.lse)
    top = torch.where(top == -torch.inf, 0.0, top)
    a, b = (first.lse - top).exp(), (second.lse - top).exp()
    total = (a + b).clamp(min=torch.finfo(torch.float32).tiny)
    mixed = (
        first.output.float() * (a / total)[..., None]
        + second.output.float() * (b / total)[..., None]
    )
    return mixed.to(first.output.dtype)


def united(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint parts, itself a part."""
    return Partial(combine(first, second), torch.logaddexp(first.lse, second.lse))


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

    @abc.abstractmethod
    def resolve(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        coding: Coding | None = None,
    ) -> AttentionBackend:
        """The backend that reads caches on `device`, of `dtype` and head dimension `dim`.

        None for `dtype` or `dim` stands for any. `coding` is that of quantised entries, None where
        there are none. A cache resolves its backend once, when it is made.
        """


class AttentionBackend(Backend):
    """Attention of a few new tokens over one packed layer and the tail.

    B rows, the continuations of the layer's S sequences, share the packed part. `rows` int64 [B],
    on the query's device, says which sequence each of them continues; None: the sequences in
    order, each by B // S consecutive rows. Softmax statistics are float32 or better. Results of
    all backends agree within the tolerances of `gracekv.testing.tolerance`.

    Attributes:
        reads_codes: whether it reads quantised entries.
    """

    reads_codes: ClassVar[bool] = False

    def resolve(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        coding: Coding | None = None,
    ) -> AttentionBackend:
        return self

    def obstacle(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        coding: Coding | None = None,
    ) -> str | None:
        """Why caches on `device`, of `dtype` and dimension `dim`, cannot be read; None if they can.

        `coding` is that of quantised entries. The line also says what to do about it.
        """
        if coding is None or self.reads_codes:
            return None
        return (
            "It does not read quantised entries. Use backend 'auto', 'sdpa' or 'eager', or "
            "precision 'full'."
        )

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
        self, query: Tensor, prepared: Any, scale: float, rows: Tensor | None = None
    ) -> Partial:
        """Attention of query [B, H, Tq, d] to all packed entries of each row's sequence.

        Log multiplicities are added to the logits.
        """

    @abc.abstractmethod
    def tail(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Partial:
        """Attention to the tail.

        Args:
            query: [B, H, Tq, d].
            keys: [B, G, S, d], the new tokens, the queries' own included at the end.
            values: [B, G, S, d].
            mask: bool or additive float [B, 1, Tq, S], or None: query i sees the tail's first
                S - Tq + i + 1 tokens.
            scale: factor of q . k.
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
    ) -> Tensor:
        """[B, H, Tq, d]: attention to packed part and tail together."""
        return combine(
            self.packed(query, prepared, scale, rows), self.tail(query, keys, values, mask, scale)
        )

    def decode(
        self,
        query: Tensor,
        prepared: Any,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        scale: float,
        rows: Tensor | None = None,
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
        """
        query_places = torch.arange(-query.shape[2], 0, device=length.device) + length[:, None]
        places = torch.arange(keys.shape[2], device=length.device)
        seen = places <= query_places[..., None]
        return self(query, prepared, keys, values, seen[:, None], scale, rows)


BACKENDS: Registry[Backend] = Registry("backend", "how decoding reads the ragged cache")
Backend.registry = BACKENDS
