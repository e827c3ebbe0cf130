"""Attention of the context's queries when the context is read again, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.prefill import Needs, Prefill, Region
from gracekv.prefill.block_replay import BlockReplaySpec, BlockReplaySums
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("block_replay")
@dataclass(frozen=True)
class BlockReplay(Scorer):
    """Power mean of the attention that all context queries pay, moved to the end of their block.

    The question is not read. `replay` asks chosen queries over the whole prompt; this asks all of
    them over their block and the prompt's first tokens, which is what a token needs that only one
    query looks for, such as a digit of an identifier: the query of the token before it.

    Source: ours; the idea that repeating the context shows what an answer will attend to, and that
    blocks of some 2,000 tokens do, is from Kim et al. (2025), KVzip, arXiv:2505.23416, which runs
    the model a second time.

    Cost: one attention pass without values over blocks, O(L H T block d), and one over near
    tokens, O(L H T near d), during the prefill; one block of queries is held meanwhile.

    Attributes:
        block: tokens that are replayed together.
        mean_power: exponent of the mean over queries: 2 is the root mean square, larger ones come
            nearer to the maximum, for texts in which each token has one query of its own.
        near: how many tokens of the second reading itself take part in the softmax, the query's own
            and those before it: heads that look at near tokens only are served by them. 0: none.
    """

    works_sharded: ClassVar[bool] = True

    block: int = bounded(2048, at_least=1)
    mean_power: float = bounded(3.0, at_least=1)
    near: int = bounded(64, at_least=0, hint="0: the block alone.")

    def needs(self) -> Needs:
        """The sums, which the capture makes."""
        return Needs(block_replays=frozenset({self._spec}))

    @property
    def _spec(self) -> BlockReplaySpec:
        return BlockReplaySpec(self.block, self.mean_power, self.near)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Power means of attention, float32 [L, G, N], not normalised.

        Raises `MissingCaptureError` unless the sums, or the queries of the context, were captured.
        """
        sums = prefill.block_replays.get(self._spec)
        if sums is None:
            sums = _from_queries(prefill, self._spec)
        inside = sums[..., region.start : region.end] / region.length
        return TokenScores.from_scores(inside.pow(1 / self.mean_power), shard=prefill.shard)


def _from_queries(prefill: Prefill, replay: BlockReplaySpec) -> Tensor:
    """The sums of a prefill that holds queries instead, [L, G, T]."""
    device = prefill.keys[0].device
    layers = [BlockReplaySums(replay, prefill.spans) for _ in range(prefill.layers)]
    for block in replay.blocks(prefill.spans):
        at = torch.arange(block.start, block.end)
        view = prefill.with_queries(at)
        for layer, sums in enumerate(layers):
            queries, keys = view.queries_at(layer, at), prefill.keys[layer]
            rope, logits = prefill.rope_of(layer), prefill.logits_of(layer)
            sums.add(queries, block.start, keys, rope, prefill.scale, **logits)
    return torch.stack([x.total.to(device) for x in layers if x.total is not None])
