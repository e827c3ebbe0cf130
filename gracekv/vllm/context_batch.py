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

from gracekv.vllm.context_attention import Asking, pieces
from gracekv.vllm.stored_context import StoredContext


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


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The host's part: `order` has the requests in the order of their tokens."""

    order: list[tuple[int, Asking]]
    contexts: tuple[StoredContext, ...]
    units: list[tuple[int, int, int, int, int, int]]
    first_slot: np.ndarray[Any, Any]
    merged: int


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
    work = _divide(asking, group, pages.shape[1], metadata.max_seq_len, division)
    counts = np.array([one.tokens for _, one in work.order])
    steps = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    sent = _send(
        pages.device,
        torch.stack([context.addresses for context in work.contexts], dim=1),
        torch.tensor(work.units),
        torch.from_numpy(work.first_slot),
        torch.tensor([block for block, _ in work.order]),
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
        contexts=work.contexts,
        addresses=addresses,
        units=units,
        places=torch.where(found, starts[rows] + step, -1),
        positions=torch.where(found, positions, -1),
        rows=rows,
        first_slot=first_slot,
        slots=int(work.first_slot[-1]),
        merged=work.merged,
        longest=max(unit[3] for unit in work.units),
        covers_all=int(counts.sum()) == metadata.num_actual_tokens,
    )


def _divide(
    asking: Mapping[int, Asking], group: int, heads: int, longest: int, division: Division
) -> _Work:
    """Requests that fill a unit have units of their own; others of a context share them.

    Args:
        asking: see `plan_batch`.
        group: query heads of a KV head.
        heads: KV heads.
        longest: tokens of the longest sequence in the step.
        division: how the work is divided.
    """
    most, worth, programs = division
    contexts = {one.context.header.digest: one.context for one in asking.values()}
    number = {digest: i for i, digest in enumerate(contexts)}
    parts_of_pages = -(-longest // worth)
    parts_of = [-(-context.longest // worth) for context in contexts.values()]

    def context_of(one: Asking) -> int:
        return number[one.context.header.digest]

    def fills(one: Asking) -> bool:
        return one.tokens * group >= most

    tiled = sum(-(-one.tokens * group // most) for one in asking.values())
    split = max(1, programs // (tiled * heads))
    parts_of_pages = max(1, min(split, parts_of_pages))
    parts_of = [max(1, min(split, parts)) for parts in parts_of]

    def is_final(one: Asking) -> bool:
        return fills(one) and parts_of_pages == parts_of[context_of(one)] == 1

    # Those with slots first, then by context, those that fill units after the others.
    order = sorted(
        asking.items(), key=lambda item: (is_final(item[1]), context_of(item[1]), fills(item[1]))
    )
    units: list[tuple[int, int, int, int, int, int]] = []
    pages: list[tuple[int, int, int, int, int, int]] = []
    slots: list[int] = []
    shared: dict[int, tuple[int, int]] = {}
    row = merged = 0
    for _, one in order:
        i, rows = context_of(one), one.tokens * group
        if is_final(one):
            units += [(i, 1, first, count, 0, 1) for first, count in pieces(row, rows, most)]
            slots += [0] * one.tokens
        else:
            parts = parts_of[i]
            if fills(one):
                units += _with_parts(i, 0, row, rows, most, parts)
            else:
                first, count = shared.get(i, (row, 0))
                shared[i] = first, count + rows
            pages += _with_parts(-1, 1, row, rows, most, parts_of_pages)
            slots += [parts + parts_of_pages] * one.tokens
            merged += one.tokens
        row += rows
    for i, (first, count) in shared.items():
        units += _with_parts(i, 0, first, count, most, parts_of[i])
    first_slot = np.concatenate([[0], np.cumsum(slots)])
    return _Work(order, tuple(contexts.values()), units + pages, first_slot, merged)


def _with_parts(
    context: int, pages: int, row: int, rows: int, most: int, parts: int
) -> list[tuple[int, int, int, int, int, int]]:
    return [
        (context, pages, first, count, part, parts)
        for first, count in pieces(row, rows, most)
        for part in range(parts)
    ]


def _send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """int64 tensors on the device, in one copy that does not wait for what runs there."""
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
