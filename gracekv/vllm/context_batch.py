"""What one step of the engine computes over stored contexts; the same in every layer.

The host knows which requests have which context and how many tokens each computes in the step. In
which row of the step a request lies is found on the device, by the first block of its pages: of a
GPU the host does not know it, and never waits for it.
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

# As a row of `ContextBatch.units`.
_Unit = tuple[int, int, int, int, int, int]


class Division(NamedTuple):
    """How small the units of work are, which a kernel chooses.

    Attributes:
        rows: query rows of a unit, at most.
        entries: entries of a head, or tokens of pages, that are worth a part of their own.
        programs: pairs of a unit and a KV head that a step aims at.
    """

    rows: int
    entries: int
    programs: int


@dataclass(frozen=True, slots=True, eq=False)
class ContextBatch:
    """The n tokens of a step whose requests have a context, and the work that they are.

    A query row is a token and a query head of a KV head's group; row r is of token r // group. A
    unit of work is a range of query rows, for every KV head, with a part of a context's entries, or
    with a part of their request's pages, or with all of both. In the last case its results are
    final; otherwise they go into slots and are merged.

    Attributes:
        contexts: C contexts that occur; they stay in memory as long as this does.
        addresses: int64 [L, C, 4], of their tensors; see `StoredContext`.
        units: int64 [U, 6]: context or -1, whether pages are read, first query row and their
            number, which part, of how many.
        places: int64 [n], of each token in the step's tokens; -1 if its request is not in the step.
        positions: int64 [n], each token's place in its own sequence; it sees pages up to there.
        rows: int64 [n], the row of the block table.
        first_slot: int64 [n + 1], where the partial results of a token begin.
        slots: of all tokens.
        merged: how many tokens have slots; they are the first ones.
        longest: the most query rows of a unit.
        covers_all: whether no other tokens are in the step.
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
    """The step's work over contexts, on the device of the pages.

    Args:
        asking: requests that have a context, at least one, by the first block of their pages.
        metadata: vLLM's, of the step's attention, with tensors on the device.
        group: query heads of a KV head.
        pages: [blocks, G, block, 2d] as vLLM holds them.
        division: how the work is divided.
    """
    most, worth, programs = division
    contexts = {one.context.header.digest: one.context for one in asking.values()}
    tiled = sum(-(-one.tokens * group // most) for one in asking.values()) * pages.shape[1]
    split = max(1, programs // tiled)

    def parts(entries: int) -> int:
        return max(1, min(split, -(-entries // worth)))

    of_context = {digest: parts(context.longest) for digest, context in contexts.items()}
    order, work, slots = _divide(asking, group, most, of_context, parts(metadata.max_seq_len))
    slots_before = np.concatenate([[0], np.cumsum(slots)])
    counts = np.array([one.tokens for _, one in order])
    steps = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    sent = _send(
        pages.device,
        torch.stack([context.addresses for context in contexts.values()], dim=1),
        torch.tensor(work),
        torch.from_numpy(slots_before),
        torch.tensor([block for block, _ in order]),
        torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        torch.from_numpy(steps),
    )
    addresses, units, first_slot, blocks, request, step = sent
    starts = metadata.query_start_loc
    first_blocks = metadata.block_table[: len(starts) - 1, 0]
    same = first_blocks[None, :] == blocks[:, None]
    row = same.int().argmax(1)
    found = same.any(1)[request]
    rows = row[request]
    new = starts[1:] - starts[:-1]
    positions = metadata.seq_lens[: len(new)][rows] - new[rows] + step
    return ContextBatch(
        contexts=tuple(contexts.values()),
        addresses=addresses,
        units=units,
        places=torch.where(found, starts[rows] + step, -1),
        positions=torch.where(found, positions, -1),
        rows=rows,
        first_slot=first_slot,
        slots=sum(slots),
        merged=sum(map(bool, slots)),
        longest=max(count for _, _, _, count, _, _ in work),
        covers_all=int(counts.sum()) == metadata.num_actual_tokens,
    )


def _divide(
    asking: Mapping[int, Asking], group: int, most: int, parts_of: Mapping[str, int], of_pages: int
) -> tuple[list[tuple[int, Asking]], list[_Unit], list[int]]:
    """Requests in the order of their tokens, units, and how many slots each token has.

    Requests that fill a unit have units of their own; others of a context share them.

    Args:
        asking: see `plan_batch`.
        group: query heads of a KV head.
        most: query rows of a unit.
        parts_of: of the contexts that occur, by digest.
        of_pages: parts of pages.
    """
    number = {digest: i for i, digest in enumerate(parts_of)}

    def fills(one: Asking) -> bool:
        return one.tokens * group >= most

    def is_final(one: Asking) -> bool:
        return fills(one) and of_pages == parts_of[one.context.header.digest] == 1

    def place(item: tuple[int, Asking]) -> tuple[bool, int, bool]:
        one = item[1]
        return is_final(one), number[one.context.header.digest], fills(one)

    # Those with slots first, then by context, those that fill units after the others.
    order = sorted(asking.items(), key=place)
    units: list[_Unit] = []
    pages: list[_Unit] = []
    slots: list[int] = []
    shared: dict[str, tuple[int, int]] = {}
    row = 0
    for _, one in order:
        digest, rows = one.context.header.digest, one.tokens * group
        if is_final(one):
            units += _with_parts(number[digest], 1, row, rows, most, 1)
            slots += [0] * one.tokens
        else:
            if fills(one):
                units += _with_parts(number[digest], 0, row, rows, most, parts_of[digest])
            else:
                first, count = shared.get(digest, (row, 0))
                shared[digest] = first, count + rows
            pages += _with_parts(-1, 1, row, rows, most, of_pages)
            slots += [parts_of[digest] + of_pages] * one.tokens
        row += rows
    for digest, (first, count) in shared.items():
        units += _with_parts(number[digest], 0, first, count, most, parts_of[digest])
    return order, units + pages, slots


def _with_parts(
    context: int, pages: int, row: int, rows: int, most: int, parts: int
) -> list[_Unit]:
    return [
        (context, pages, row + at, min(most, rows - at), part, parts)
        for at in range(0, rows, most)
        for part in range(parts)
    ]


def _send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """int64 tensors on the device, in one copy that does not wait for what runs there."""
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
