"""What one step of the engine computes over stored contexts; the same in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracekv.vllm.stored_context import StoredContext

# Queries of a KV head that go over entries together. Source: ours.
_MOST_QUERIES = 96
# Entries of a head that one unit of work reads, if there are few queries. Source: ours.
_ENTRIES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ContextBatch:
    """The tokens of a step whose requests have a context, and the work that they are.

    A unit of work is a KV head and some tokens with either a range of a context's entries or the
    tokens' own pages; the results of a token's units are merged.

    Attributes:
        contexts: C contexts that occur.
        addresses: int64 [L, C, 4], of their tensors; see `StoredContext`.
        tokens: int64 [n], places in the step's tokens, those of a context together.
        positions: int64 [n], each token's place in its own sequence; it sees pages up to there.
        rows: int64 [n], the row of the block table.
        first_slot: int64 [n + 1], where the partial results of a token begin.
        work: int64 [W, 6]: context or -1 for pages, KV head, first of `tokens` and their number,
            which part of the head's entries, of how many.
        longest: the most tokens of a unit.
        covers_all: whether no other tokens are in the step.
    """

    contexts: tuple[StoredContext, ...]
    addresses: Tensor
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    first_slot: Tensor
    work: Tensor
    longest: int
    covers_all: bool


def plan_batch(
    named: Mapping[int, StoredContext],
    first_blocks: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    group: int,
) -> ContextBatch | None:
    """The step's work over contexts; None if no request has one.

    Args:
        named: contexts of requests, by the first block of their pages.
        first_blocks: the first block of each row's pages.
        starts: R + 1 places in the step's tokens where each row's begin.
        lengths: tokens of each row's sequence so far, those of this step included.
        group: query heads of a KV head.
    """
    found = [(row, named[block]) for row, block in enumerate(first_blocks) if block in named]
    if not found:
        return None
    order = {context.header.digest: context for _, context in found}
    contexts = tuple(order.values())
    number = {digest: i for i, digest in enumerate(order)}
    found.sort(key=lambda pair: number[pair[1].header.digest])

    most = max(1, _MOST_QUERIES // group)
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    of_context = [0] * (len(contexts) + 1)
    pages: list[tuple[int, int]] = []
    for row, context in found:
        new = starts[row + 1] - starts[row]
        pages += _tiles(len(tokens), new, most)
        tokens += range(starts[row], starts[row] + new)
        positions += range(lengths[row] - new, lengths[row])
        rows += [row] * new
        of_context[number[context.header.digest] + 1] += new

    heads = contexts[0].layers[0].heads
    work: list[tuple[int, int, int, int, int, int]] = []
    parts = np.empty(len(tokens), np.int64)
    for i, context in enumerate(contexts):
        of_context[i + 1] += of_context[i]
        count = of_context[i + 1] - of_context[i]
        tiles = _tiles(of_context[i], count, most)
        # Many tokens are work enough for all threads.
        split = 1 if len(tiles) > 1 else -(-max(1, context.longest) // _ENTRIES)
        parts[of_context[i] : of_context[i + 1]] = split
        work += [
            (i, head, first, many, part, split)
            for first, many in tiles
            for part in range(split)
            for head in range(heads)
        ]
    work += [(-1, head, first, many, 0, 1) for first, many in pages for head in range(heads)]
    slots = np.concatenate([[0], np.cumsum(parts + 1)])
    return ContextBatch(
        contexts,
        torch.stack([context.addresses for context in contexts], dim=1),
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(rows),
        torch.from_numpy(slots),
        torch.tensor(work),
        max(many for _, _, _, many, _, _ in work),
        len(tokens) == starts[-1],
    )


def _tiles(first: int, count: int, most: int) -> list[tuple[int, int]]:
    """(first, number) of pieces of at most `most` tokens."""
    return [(first + i, min(most, count - i)) for i in range(0, count, most)]
