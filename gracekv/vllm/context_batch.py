"""The plan of a step's attention over stored contexts; all layers share it.

The host knows each request's context and its number of tokens in the step. A request's row in the
step is found on the device, by the request's last page: on a GPU the host does not know it, and
must not wait for it. Earlier pages may be shared with another request that begins the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gracekv.vllm.context_attention import Asking
from gracekv.vllm.stored_context import StoredContext

# A row of `ContextBatch.units`.
_Unit = tuple[int, int, int, int, int, int]


class Division(NamedTuple):
    """The size of the units of work for a kernel.

    Attributes:
        rows: maximum query rows of a unit.
        entries: entries of a head, or tokens of pages, that justify a part of their own.
        programs: target number of (unit, KV head) pairs per step.
    """

    rows: int
    entries: int
    programs: int


@dataclass(frozen=True, slots=True, eq=False)
class ContextBatch:
    """The n tokens of a step whose requests have a context, and their units of work.

    A query row is a token and a query head of a KV head's group; row r belongs to token r // group.
    A unit of work is a range of query rows, for every KV head, over a part of a context's entries,
    over a part of the request's pages, or over all of both. In the last case its results are final;
    otherwise they go into slots and are merged.

    Attributes:
        contexts: the C contexts of the step, which stay in memory as long as this object.
        addresses: int64 [L, C, 4] of their tensors; see `StoredContext`.
        units: int64 [U, 6]: context or -1, whether to read pages, first query row, number of query
            rows, number of the part, number of parts.
        places: int64 [n], each token's index in the step; -1 if its request is not in the step.
        positions: int64 [n], each token's position in its own sequence, up to which it sees pages.
        rows: int64 [n], each token's row of the block table.
        first_slot: int64 [n + 1], index of the first partial result of each token.
        slots: total number of slots.
        merged: number of tokens with slots, which come first.
        longest: maximum query rows of a unit.
        covers_all: whether the step has no other tokens.
    """

    contexts: tuple[StoredContext, ...]
    addresses: Tensor
    units: Tensor
    places: Tensor
    positions: Tensor
    rows: Tensor
    first_slot: Tensor
    slots: int
    merged: int
    longest: int
    covers_all: bool


def plan_batch(
    asking: Mapping[int, Asking], metadata: Any, group: int, pages: Tensor, division: Division
) -> ContextBatch:
    """Plan the step's work over contexts, on the device of the pages.

    Args:
        asking: requests about contexts (at least one), by their last page.
        metadata: vLLM's attention metadata of the step, with tensors on the device.
        group: query heads per KV head.
        pages: [blocks, G, block, 2d] of vLLM.
        division: the size of the units of work.
    """
    most, worth, programs = division
    contexts = {asker.context.header.digest: asker.context for asker in asking.values()}
    tiled = sum(-(-asker.tokens * group // most) for asker in asking.values()) * pages.shape[1]

    def parts(entries: int) -> int:
        return max(1, min(programs // tiled, -(-entries // worth)))

    of_context = {digest: parts(context.longest) for digest, context in contexts.items()}
    order, work, slots = _divide(asking, group, most, of_context, parts(metadata.max_seq_len))
    counts = np.array([asker.tokens for _, asker in order])
    addresses, units, first_slot, blocks, request, step = _send(
        pages.device,
        torch.stack([context.addresses for context in contexts.values()], dim=1),
        torch.tensor(work),
        torch.from_numpy(np.concatenate([[0], np.cumsum(slots)])),
        torch.tensor([block for block, _ in order]),
        torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        torch.from_numpy(np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)),
    )
    starts = metadata.query_start_loc
    same = last_pages(metadata, pages.shape[2])[None, :] == blocks[:, None]
    match = same.any(1)[request]
    rows = same.int().argmax(1)[request]
    new = starts[1:] - starts[:-1]
    return ContextBatch(
        contexts=tuple(contexts.values()), addresses=addresses, units=units, rows=rows,
        places=torch.where(match, starts[rows] + step, -1), first_slot=first_slot,
        positions=torch.where(match, metadata.seq_lens[: len(new)][rows] - new[rows] + step, -1),
        slots=sum(slots), merged=sum(map(bool, slots)), longest=max(unit[3] for unit in work),
        covers_all=int(counts.sum()) == metadata.num_actual_tokens,
    )  # fmt: skip


def last_pages(metadata: Any, block: int) -> Tensor:
    """int32 [R]: the page of each request's last token in the step; `block` is a page's size."""
    length = metadata.seq_lens[: len(metadata.query_start_loc) - 1].long()
    at = (length - 1).clamp_(min=0) // block
    table: Tensor = metadata.block_table[: len(length)]
    return table.gather(1, at[:, None])[:, 0]


def _divide(
    asking: Mapping[int, Asking], group: int, most: int, parts_of: Mapping[str, int], of_pages: int
) -> tuple[list[tuple[int, Asking]], list[_Unit], list[int]]:
    """Requests in the order of their tokens, the units, and each token's number of slots.

    A request that fills a unit has units of its own; the others about a context share them.

    Args:
        asking: see `plan_batch`.
        group: query heads per KV head.
        most: maximum query rows of a unit.
        parts_of: number of parts of each context, by digest.
        of_pages: number of parts of pages.
    """
    number = {digest: i for i, digest in enumerate(parts_of)}

    def fills(asker: Asking) -> bool:
        return asker.tokens * group >= most

    def is_final(asker: Asking) -> bool:
        return fills(asker) and of_pages == parts_of[asker.context.header.digest] == 1

    def place(item: tuple[int, Asking]) -> tuple[bool, int, bool]:
        asker = item[1]
        return is_final(asker), number[asker.context.header.digest], fills(asker)

    # Requests with slots first; then by context, with those that fill units last.
    order = sorted(asking.items(), key=place)
    units, pages, slots = list[_Unit](), list[_Unit](), list[int]()
    shared: dict[str, tuple[int, int]] = {}
    row = 0
    for _, asker in order:
        digest, rows = asker.context.header.digest, asker.tokens * group
        if is_final(asker):
            units += _in_parts(number[digest], 1, row, rows, most, 1)
            slots += [0] * asker.tokens
        else:
            if fills(asker):
                units += _in_parts(number[digest], 0, row, rows, most, parts_of[digest])
            else:
                first, count = shared.get(digest, (row, 0))
                shared[digest] = first, count + rows
            pages += _in_parts(-1, 1, row, rows, most, of_pages)
            slots += [parts_of[digest] + of_pages] * asker.tokens
        row += rows
    for digest, (first, count) in shared.items():
        units += _in_parts(number[digest], 0, first, count, most, parts_of[digest])
    return order, units + pages, slots


def _in_parts(context: int, pages: int, row: int, rows: int, most: int, parts: int) -> list[_Unit]:
    return [
        (context, pages, row + at, min(most, rows - at), part, parts)
        for at in range(0, rows, most)
        for part in range(parts)
    ]


def _send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy int64 tensors to the device at once, without waiting for work that runs there."""
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
