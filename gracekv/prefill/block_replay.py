"""What a second reading of the context would look at, block by block, during the first.

When a model repeats a text, its heads make nearly the queries of the first reading, and attend
mostly to what followed. So the queries of each block of context tokens are moved to the block's
end, from which they see the whole block. Keys and queries of a block are there while the prefill
runs, so nothing of it is held longer, and the cost grows with the prompt, not with its square.

Source: ours; the idea that repeating the context shows what an answer will attend to is from Kim et
al. (2025), KVzip, arXiv:2505.23416, which runs the model a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.prefill.spans import PromptSpans, Region
from gracekv.rope import Rope

# First tokens of the prompt, which many heads attend to when they look for nothing.
SINKS = 4


@dataclass(frozen=True, slots=True)
class BlockReplaySpec:
    """Which sums are made.

    Attributes:
        block: context tokens whose queries are moved together.
        power: exponent of attention, at least 1.
    """

    block: int
    power: float

    def blocks(self, spans: PromptSpans) -> Iterator[Region]:
        """The blocks of a context, one after the other; the last may be shorter."""
        start = max(spans.context_start, spans.past)
        for first in range(start, spans.context_end, self.block):
            yield Region(first, min(first + self.block, spans.context_end))

    def add(
        self,
        total: Tensor,
        queries: Tensor,
        keys: Tensor,
        block: Region,
        rope: Rope,
        scale: float,
        **logits: Any,
    ) -> None:
        """Add sum_u p_{u,t}^power of a block's queries to `total`; mean over a KV head's queries.

        The softmax runs over the prompt's first 4 tokens and the `block` keys up to the block's
        end, which only a short last block shares with the one before.

        Args:
            total: float32 [G, T], changed in place; on the keys' device.
            queries: [H, n, d] post-RoPE, of the block's n tokens.
            keys: [G, at least the block's end, d] post-RoPE.
            block: of the context.
            rope: covers the block.
            scale: of the logits.
            logits: `softcap` and `sinks` as in `softmax_columns`.
        """
        first = block.end - self.block
        first = first if first > SINKS else 0
        seen = keys[:, first : block.end]
        if first:
            seen = torch.cat([keys[:, :SINKS], seen], dim=1)
        sinks = SINKS if first else 0
        at = torch.arange(block.start, block.end)
        moved = rope.moved(at, block.end - 1).rotate(queries.float() * scale, torch.arange(len(at)))
        whole = torch.full_like(at, seen.shape[1])
        columns = softmax_columns(moved, seen, whole, power=self.power, **logits)
        total[:, first : block.end] += reduce(
            columns[:, sinks:], "(g n) t -> g t", "mean", g=len(keys)
        )


class BlockReplaySums:
    """The sums of one layer, from queries that come in runs of any length.

    Args:
        replay: what to add up.
        spans: of the prompt, T tokens.

    Attributes:
        total: float32 [G, T]; None before the first run.
    """

    def __init__(self, replay: BlockReplaySpec, spans: PromptSpans) -> None:
        self._replay, self._spans = replay, spans
        self._waiting: Tensor | None = None
        self.total: Tensor | None = None

    def add(
        self, queries: Tensor, first: int, keys: Tensor, rope: Rope, scale: float, **logits: Any
    ) -> None:
        """Count the queries [H, C, d] of the positions first, first + 1, ...; `keys` reach as far.

        Queries wait until their block is complete: at most one block of them is held.
        """
        end = first + queries.shape[1]
        if self.total is None:
            size = (len(keys), self._spans.length)
            self.total = keys.new_zeros(size, dtype=torch.float32)
        for block in self._replay.blocks(self._spans):
            start, stop = max(block.start, first), min(block.end, end)
            if start >= stop:
                continue
            rows = queries[:, start - first : stop - first]
            if stop - start < block.length:
                rows = self._collected(rows, start - block.start, block.length)
            if stop == block.end:
                self._replay.add(self.total, rows, keys, block, rope, scale, **logits)
                self._waiting = None

    def _collected(self, rows: Tensor, at: int, length: int) -> Tensor:
        """The block's queries so far, with `rows` [H, n, d] from its token `at` on."""
        if self._waiting is None:
            self._waiting = rows.new_empty(rows.shape[0], length, rows.shape[2])
        self._waiting[:, at : at + rows.shape[1]] = rows
        return self._waiting
