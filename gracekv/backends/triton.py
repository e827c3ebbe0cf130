"""The `triton` backend; the kernels are in `triton_split_kernel` and `triton_merge_kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gracekv.backends.base import (
    BACKENDS,
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    check_rows,
)
from gracekv.backends.triton_splits import SplitTables, split_tables
from gracekv.backends.triton_tiles import tiles
from gracekv.cache.coded import CodedEntries
from gracekv.cache.entries import LayerEntries
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.kernels import device as gpu
from gracekv.kernels.addresses import contiguous_rows
from gracekv.registry import bounded


@dataclass(frozen=True, slots=True, eq=False)
class TritonEntries:
    """One layer with its tables of splits.

    Attributes:
        keys: [E, d], rows contiguous.
        values: [E, d].
        bias: float32 [E], log multiplicity.
        heads: G.
        sequences: S.
        tables: the splits.
        capability: the GPU's compute capability.
        programs: target number of kernel programs.
        coded: quantised entries, whose splits are also in `tables`.
        copied: bytes of keys and values that had to be copied to make their rows contiguous.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    heads: int
    sequences: int
    tables: SplitTables
    capability: tuple[int, int]
    programs: int
    coded: tuple[CodedEntries, ...]
    copied: int


@BACKENDS.register("triton")
class Triton(AttentionBackend):
    """Ragged split-KV kernel for NVIDIA GPUs: no padding, work balanced over uneven heads.

    Source: split-KV decoding with a merge by log-sum-exp is FlashDecoding (Dao et al., 2023).
    Ours: the splits over ragged heads and the additive log multiplicity.

    Cost: a step reads each packed entry once, without padding; the tables of splits are held in
    addition to the cache.

    Attributes:
        splits_per_processor: splits per streaming multiprocessor; two fit on each.
        processors: number of streaming multiprocessors to plan for; by default the GPU's own. A
            fixed number gives bitwise equal results on GPUs of different size.

    Needs: the extra `gracekv[triton]` and a GPU of compute capability 8.0 or newer. Reads float32,
    float16 and bfloat16 with heads of dimension 256 or less. Nothing is copied or padded.
    """

    splits_per_processor: int = bounded(2, at_least=1)
    processors: int | None = bounded(None, at_least=1, hint="None takes the GPU's own number.")

    def obstacle(self, spec: AttentionSpec) -> str | None:
        """The reason why this backend cannot read a layer, with a remedy, or None if it can."""
        reason = gpu.obstacle(spec.device, "backend 'sdpa'")
        if reason is None and spec.dtype is not None and spec.dim is not None:
            try:
                tiles(spec.dim, spec.dtype, (8, 0))
            except BackendUnavailableError as error:
                reason = str(error)
        return reason

    def prepare(self, layer: LayerEntries) -> TritonEntries:
        return self.prepare_all([layer])[0]

    def prepare_all(self, layers: Sequence[LayerEntries]) -> list[TritonEntries]:
        device = layers[0].device
        self.require(AttentionSpec(device))
        capability, processors = gpu.capability(device), self.processors or gpu.processors(device)
        blocks = [tiles(layer.dim, layer.dtype, capability).keys for layer in layers]
        tables = split_tables(layers, blocks, processors, self.splits_per_processor)
        programs = self.splits_per_processor * processors
        pairs = zip(layers, tables, strict=True)
        return [_entries(layer, own, capability, programs) for layer, own in pairs]

    def held_bytes(self, prepared: TritonEntries) -> int:
        return prepared.tables.bytes + prepared.copied

    def __call__(self, step: AttentionStep) -> Tensor:
        """[B, H, Tq, d]: one launch for both parts, and a second one that merges all splits.

        Grid, workspace and launch arguments depend only on shapes, so a CUDA graph stays valid
        while tokens are appended and `step.length` is updated in place.

        Raises `ShapeError` if shapes do not match; kernels do not check addresses.
        """
        # Imported here, so that gracekv can be imported without triton.
        from gracekv.backends.triton_attention import ragged_attention

        prepared, query, rows = step.packed, step.query, step.rows
        _check(step)
        count = query.shape[1] // prepared.heads * query.shape[2]
        tile = tiles(query.shape[3], query.dtype, prepared.capability, count)
        readers = query.shape[0] * -(-count // tile.queries) // prepared.sequences
        table = prepared.tables.for_readers(readers)
        exact, *others = table.parts
        found = [x.arguments(own) for own, x in zip(prepared.coded, others, strict=True)]
        codes = [tensor for tensors, _ in found for tensor in tensors]
        codings = [number for _, numbers in found for number in numbers]
        rows = None if rows is None else rows.contiguous()
        length = None if step.length is None else step.length.contiguous()
        packed = (prepared.keys, prepared.values, prepared.bias, exact.items, exact.item_first)
        tail = (step.keys, step.values, length, step.mask)
        sizes = (step.scale, table.slots, exact.most, prepared.programs)
        given = (query, *packed, table.row_first, rows, *tail, *sizes, codes, codings)
        output: Tensor = ragged_attention(*given, step.softcap, step.sink_logits)
        return output


def _entries(
    layer: LayerEntries, tables: SplitTables, capability: tuple[int, int], programs: int
) -> TritonEntries:
    exact = layer.exact
    keys, values = contiguous_rows(exact.keys, exact.values)
    pairs = ((keys, exact.keys), (values, exact.values))
    return TritonEntries(
        keys=keys,
        values=values,
        bias=exact.log_multiplicity.float().contiguous(),
        heads=layer.heads,
        sequences=layer.sequences,
        tables=tables,
        capability=capability,
        programs=programs,
        coded=layer.coded,
        copied=sum(new.nbytes for new, old in pairs if new is not old),
    )


def _check(step: AttentionStep) -> None:
    """Raise `ShapeError` unless shapes match; the kernel does not check addresses."""
    query, packed, length = step.query, step.packed, step.length
    keys, values, mask = step.keys, step.values, step.mask
    batch, heads, tokens, dim = query.shape
    if dim != packed.keys.shape[1] or query.dtype != packed.keys.dtype:
        raise ShapeError(
            f"The packed keys are {packed.keys.dtype} of dimension {packed.keys.shape[1]}; got "
            f"queries in {query.dtype} of dimension {dim}."
        )
    if heads % packed.heads:
        raise ShapeError(f"Query heads form equal groups for {packed.heads} KV heads; got {heads}.")
    check_rows(step.rows, batch, packed.sequences)
    fits = (keys.shape[0], keys.shape[3]) == (batch, dim) and keys.shape == values.shape
    if not fits or heads % keys.shape[1] or not keys.dtype == values.dtype == query.dtype:
        raise ShapeError(
            f"For queries {list(query.shape)} in {query.dtype} the tail is keys and values "
            f"[{batch}, G, S, {dim}] of the same dtype, G a divisor of {heads}; got "
            f"{list(keys.shape)} in {keys.dtype} and {list(values.shape)} in {values.dtype}."
        )
    seen = (1, tokens, keys.shape[2])
    if mask is not None and (mask.shape[1:] != seen or mask.shape[0] not in (1, batch)):
        raise ShapeError(
            f"The tail's mask is [{batch}, 1, {tokens}, {keys.shape[2]}]; got {list(mask.shape)}."
        )
    if length is not None and (length.shape != (batch,) or length.device != query.device):
        raise ShapeError(
            f"The triton backend takes `length` [B] on the query's device; got "
            f"{list(length.shape)} on {length.device} for a batch of {batch} on {query.device}."
        )
