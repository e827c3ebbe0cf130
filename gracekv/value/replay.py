"""Attention of the context's queries when they are moved to the end of the prompt.

An answer repeats words of its context. When the model repeats a word, its heads produce nearly the
same queries as when they first read it, and attend mostly to what followed. So the captured queries
of the context are rotated to the prompt's last position, from which they see the whole context,
including the tokens after their own. This approximates KVzip's second pass without running it.
"""

from __future__ import annotations

from dataclasses import field

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.kernels.uploads import upload
from gracekv.prefill import LayerCapture, Needs, Prefill, Region
from gracekv.prefill.needs import region_samples
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, noted, part_scores
from gracekv.value.read_ahead import ReadAhead


@SCORERS.register("replay", works_sharded=True)
class Replay(Scorer):
    """Attention of the context's queries, moved to the prompt's end; likely answers weigh more.

    Root mean square over queries, or another power mean: dropping a token that one query needs
    changes one output a lot, and squared errors add up. Half of the weight goes to queries of
    tokens that `query_scorer` finds likely to appear in the answer, half is uniform. A token is
    likely if some probe of some head attends to it in most of `likely_layers` layers: each value of
    a list may be read by heads of its own, which a mean over probes and heads would hide.

    Source: ours; the idea that repeating the context shows what an answer will attend to is from
    Kim et al. (2025), KVzip, arXiv:2505.23416, which runs the model a second time.

    Cost: attention rows of at most `max_queries` context queries in every layer, or twice as many
    with `context_share`, O(L H Q T d); the queries of every position must be captured.

    Attributes:
        query_scorer: scores how likely a token is to appear in the answer: maximum over the heads
            of a layer, mean over layers.
        power: exponent of that likelihood; the larger it is, the fewer queries share the weight
            that is not uniform.
        mean_power: exponent of the mean over queries: 2 is the root mean square; larger ones come
            closer to the maximum, for texts in which each token is read by one query.
        uniform_weight: share of the weight that is spread equally over the queries; with 1, the
            question is ignored and all queries are evenly spaced.
        max_queries: number of queries; in a longer context, half are evenly spaced and the rest are
            those of the likeliest tokens.
        likely_layers: how many layers determine a layer's likely tokens: itself and the next ones
            below, so it can be scored as soon as it is read; or 0 for all layers.
        context_share: share of a longer context whose queries are replayed, at most twice
            `max_queries`. The uniform weight then goes to all queries, not only to the evenly
            spaced ones. 0 means `max_queries` at any length, and so does `uniform_weight` 1.
    """

    query_scorer: ReadAhead = field(default_factory=lambda: ReadAhead(lookahead=12, max_weight=1.0))
    power: float = bounded(4.0, above=0)
    mean_power: float = bounded(2.0, at_least=1)
    uniform_weight: float = bounded(0.5, at_least=0, at_most=1)
    max_queries: int = bounded(1024, at_least=2)
    likely_layers: int = bounded(4, at_least=0)
    context_share: float = bounded(0.0, at_least=0, at_most=1)

    def needs(self) -> Needs:
        """Evenly spaced queries of the context, and those of likely words, chosen later."""
        if self.uniform_weight == 1:
            return Needs(context_samples=frozenset({self.max_queries}))
        own = Needs(later_queries=True, context_samples=frozenset({self.max_queries // 2}))
        return own | self.query_scorer.needs()

    @property
    def compares_layers(self) -> bool:
        """Whether a layer's likely tokens depend on layers above."""
        return self.uniform_weight < 1 and not self.likely_layers

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """The queries of all layers, int64 [P]."""
        if self.uniform_weight < 1:
            prefill = prefill.with_queries(self.query_scorer.asks(prefill, region, memory))
            for capture in prefill:
                self._note_likely(capture, region, memory)
        chosen = [self.select_queries(capture, region, memory)[0] for capture in prefill]
        union: Tensor = torch.cat(chosen).unique().cpu()
        return union

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Power means of attention [G, N]: (sum_u w_u p_{u,t}^m)^(1/m), not normalised.

        m is `mean_power`. The queries u are rotated to the last position. The softmax runs over the
        whole prompt without a mask; powers are averaged over a KV head's query heads.
        """
        at, weights = self.select_queries(capture, region, memory)
        length, queries = capture.spans.length, capture.queries_at(at)
        asked = torch.empty_like(queries, dtype=torch.float32)
        capture.rope.moved(slice(0, length), length - 1).rotate(queries, at, asked)
        args = {"power": self.mean_power, **capture.softmax_args}
        columns = softmax_columns(asked, capture.keys, length, weights, **args)
        inside = columns[:, region.start : region.end]
        powers = reduce(inside, "(g n) t -> g t", "mean", g=capture.kv_heads)
        return powers.pow_(1 / self.mean_power)

    def select_queries(
        self, capture: LayerCapture, region: Region, memory: Memory, total: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Positions int64 [Q] of a layer's context queries, and weights float32 [Q] of sum `total`.

        The evenly spaced ones come first, then the likeliest, unless all are taken. Both are on the
        device of the layers' likelihoods; if these are not needed, positions are on the CPU.
        """
        if self.uniform_weight == 1:
            at = region_samples(region, self.max_queries)
            return at, torch.full((len(at),), total / len(at), dtype=torch.float32)
        asked = min(int(self.context_share * region.length), 2 * self.max_queries)
        count = min(max(self.max_queries, asked), region.length)
        likely = self._likely(capture, region, memory)
        if count == region.length:
            alike = count
            at = torch.arange(region.start, region.end, device=likely.device)
        else:
            alike = count if self.context_share else self.max_queries // 2
            best = self._ranks(likely, capture, region, memory)[:count]
            at, likely = best + region.start, likely[best]
        if (key := ("share", self, total, region)) not in memory:
            share = memory[key] = likely.new_zeros(count)
            share[:alike] = total * self.uniform_weight / max(1, alike)
        # Negligible unless no token is likely.
        chance = likely.pow(self.power).add_(1e-30)
        rest = total * (1 - self.uniform_weight)
        weights = torch.addcdiv(memory[key], chance, chance.sum(), value=rest)
        # All processes need the same positions.
        return capture.shard.from_first(at), capture.shard.from_first(weights)

    def _ranks(
        self, likely: Tensor, capture: LayerCapture, region: Region, memory: Memory
    ) -> Tensor:
        """int64 [N]: the evenly spaced tokens, then all others by their likelihood [N].

        Replays with the same likelihood but different `max_queries` share a sort.
        """
        alike = ("ranks", self.query_scorer, self.likely_layers, region)
        asked: list[int] = memory.setdefault(alike, [])
        if self.max_queries not in asked:
            asked.append(self.max_queries)
        key = (*alike, *asked)
        if (*key, "spaced") not in memory:
            spaced = torch.zeros(len(asked), len(likely), dtype=torch.bool)
            for row, most in zip(spaced, asked, strict=True):
                row[region_samples(region, most // 2) - region.start] = True
            memory[(*key, "spaced")] = upload(spaced, likely.device)

        def ranks() -> Tensor:
            # A stable sort: ties go to the earlier token, as everywhere.
            first = likely.masked_fill(memory[(*key, "spaced")], torch.inf)
            return first.argsort(dim=1, descending=True, stable=True)

        return noted(memory, key, capture, ranks)[asked.index(self.max_queries)]

    def _note_likely(
        self, capture: LayerCapture, region: Region, memory: Memory
    ) -> dict[int, Tensor]:
        """Add this layer's token likelihoods, float32 [N], to those of other layers."""
        rows: dict[int, Tensor] = memory.setdefault(("likely", self.query_scorer, region), {})
        if capture.number not in rows:
            best = part_scores(self.query_scorer, capture, region, memory).amax(dim=0)
            rows[capture.number] = capture.shard.maximum(best).to(capture.info.device)
        return rows

    def _likely(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """float32 [N]: this layer's likelihood that each token appears in the answer."""

        def mean() -> Tensor:
            rows, last = self._note_likely(capture, region, memory), capture.number
            first = last - self.likely_layers
            read = [x for n, x in rows.items() if first < n <= last or not self.likely_layers]
            return torch.stack(read).mean(dim=0)

        return noted(memory, ("mean", self.query_scorer, self.likely_layers, region), capture, mean)
