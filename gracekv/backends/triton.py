"""The `triton` backend; the kernels are in `triton_split_kernel` and `triton_merge_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.backends.attention_spec import AttentionSpec
from gracekv.backends.base import BACKENDS, AttentionBackend, Partial
from gracekv.backends.triton_layer import TritonLayer, check_packed, check_tail
from gracekv.backends.triton_splits import split_tables
from gracekv.backends.triton_tiles import tiles
from gracekv.cache.base import RaggedLayer
from gracekv.cache.quantised import QuantisedLayer
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.kernels import device as gpu
from gracekv.registry import bounded


@final
@BACKENDS.register("triton")
@dataclass(frozen=True, slots=False)
class Triton(AttentionBackend):
    """Ragged split-KV kernel for NVIDIA GPUs: no padding, work balanced over uneven heads.

    Source: split-KV decoding with a merge by log-sum-exp is FlashDecoding (Dao et al., 2023).
    Ours: the splits over ragged heads and the additive log multiplicity.

    Cost: a step reads each packed entry once, without padding; the tables of splits are held beside
    the cache.

    Attributes:
        splits_per_processor: splits per streaming multiprocessor; two fit on each.
        processors: how many to plan for; None: those of the cache's GPU. A fixed number gives the
            same bits on GPUs of different size.

    Needs: the extra `gracekv[triton]` and a GPU of compute capability 8.0 or newer. Reads float32,
    float16 and bfloat16 with heads of dimension 256 or less. Nothing is copied or padded.
    """

    reads_codes: ClassVar[bool] = True
    takes_softcap: ClassVar[bool] = True
    takes_sink_logits: ClassVar[bool] = True
    splits_per_processor: int = bounded(2, at_least=1)
    processors: int | None = bounded(None, at_least=1, hint="None takes the GPU's own number.")

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot read such a layer, and what to do about it; None if it can."""
        reason = super().obstacle(spec) or gpu.obstacle(spec.device, _OTHERWISE)
        if reason is None and spec.dtype is not None and spec.dim is not None:
            try:
                tiles(spec.dim, spec.dtype, (8, 0))
            except BackendUnavailableError as error:
                reason = str(error)
        return reason

    def prepare(self, layer: RaggedLayer | QuantisedLayer) -> TritonLayer:
        exact, coded = (
            (layer.exact, layer.coded) if isinstance(layer, QuantisedLayer) else (layer, ())
        )
        device = exact.keys.device
        self.require(AttentionSpec(device))
        capability = gpu.capability(device)
        block = tiles(exact.dim, exact.keys.dtype, capability).keys
        keys, values = (_rows_contiguous(x) for x in (exact.keys, exact.values))
        copied = sum(
            new.numel() * new.element_size()
            for new, old in ((keys, exact.keys), (values, exact.values))
            if new is not old
        )
        return TritonLayer(
            keys=keys,
            values=values,
            bias=exact.log_multiplicity.float().contiguous(),
            heads=layer.heads,
            sequences=layer.sequences,
            tables=split_tables(
                exact.offsets,
                layer.sequences,
                block,
                device,
                coded=coded,
                processors=self._processors(device),
                per_processor=self.splits_per_processor,
            ),
            capability=capability,
            programs=self._programs(device),
            coded=coded,
            copied=copied,
        )

    def held_bytes(self, prepared: TritonLayer) -> int:
        return prepared.tables.bytes + prepared.copied

    def packed(
        self,
        query: Tensor,
        prepared: TritonLayer,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
    ) -> Partial:
        return Partial(*self._run(query, prepared, None, None, None, None, scale, rows, softcap))

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
        self.require(AttentionSpec(query.device))
        return Partial(*self._run(query, None, keys, values, None, mask, scale, None, softcap))

    def __call__(
        self,
        query: Tensor,
        prepared: TritonLayer,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
        *,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """[B, H, Tq, d]: both parts in one launch, and a second one that merges all splits."""
        extras = (softcap, sink_logits)
        return self._run(query, prepared, keys, values, None, mask, scale, rows, *extras)[0]

    def decode(
        self,
        query: Tensor,
        prepared: TritonLayer,
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

        Grid, workspace and launch arguments follow from shapes alone, so a CUDA graph recorded
        once is valid while tokens are appended and `length` is updated in place.

        Args:
            query: [B, H, Tq, d].
            prepared: from `prepare`.
            keys: [B, G, C, d]; places from `length` on may hold anything.
            values: [B, G, C, d].
            length: int32 or int64 [B], tokens in each row's tail, the queries' own included.
            scale: factor of q . k.
            rows: int64 [B], or None.
            softcap: see `AttentionBackend.__call__`.
            sink_logits: [H], likewise.

        Raises `ShapeError` if `length` does not fit the batch.
        """
        if length.shape != query.shape[:1] or length.device != query.device:
            raise ShapeError(
                f"Triton.decode takes `length` [B] on the query's device; got "
                f"{list(length.shape)} on {length.device} for a batch of {query.shape[0]} on "
                f"{query.device}."
            )
        length, extras = length.contiguous(), (softcap, sink_logits)
        return self._run(query, prepared, keys, values, length, None, scale, rows, *extras)[0]

    def _run(
        self,
        query: Tensor,
        prepared: TritonLayer | None,
        keys: Tensor | None,
        values: Tensor | None,
        length: Tensor | None,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Imported here, so that gracekv can be imported without triton.
        from gracekv.backends.triton_attention import ragged_attention

        packed: tuple[Tensor | None, ...] = (None,) * 7
        slots, splits, programs = 0, 0, 0
        codes: list[Tensor] = []
        codings: list[int] = []
        if prepared is None:
            programs = self._programs(query.device)
        else:
            check_packed(query, prepared, rows)
            count = query.shape[1] // prepared.heads * query.shape[2]
            tile = tiles(query.shape[3], query.dtype, prepared.capability, count)
            readers = query.shape[0] * -(-count // tile.queries) // prepared.sequences
            table = prepared.tables.for_readers(readers)
            slots, splits, programs = table.slots, table.most, prepared.programs
            for entries, coded_splits in zip(prepared.coded, table.coded, strict=True):
                tensors, numbers = coded_splits.arguments(entries)
                codes += tensors
                codings += numbers
            packed = (
                prepared.keys,
                prepared.values,
                prepared.bias,
                table.items,
                table.item_first,
                table.row_first,
                None if rows is None else rows.contiguous(),
            )
        if keys is not None and values is not None:
            check_tail(query, keys, values, mask)
        result: tuple[Tensor, Tensor] = ragged_attention(
            query,
            *packed,
            keys,
            values,
            length,
            mask,
            scale,
            slots,
            splits,
            programs,
            codes,
            codings,
            softcap,
            sink_logits,
        )
        return result

    def _processors(self, device: torch.device) -> int:
        return self.processors or gpu.processors(device)

    def _programs(self, device: torch.device) -> int:
        return self.splits_per_processor * self._processors(device)


_OTHERWISE = "backend 'sdpa'"


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
