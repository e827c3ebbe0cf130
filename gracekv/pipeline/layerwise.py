"""Compression while the prompt is read: each layer is cut as soon as it is whole.

Where a global top-k chooses among single tokens, what is not among the best B of the layers so far
is not among the best B of all. So after each layer its tokens join those that were kept below it,
the best B stay, and the rest is dropped for good. What is held at the end includes what the auction
over all layers chooses, which is that of `Pipeline.run`, to the last tie. Of dropped tokens only
their scores are held, and what the fit noted. Source: ours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import Budget, BudgetPlan, Selection
from gracekv.allocate.ranking import first_fitting
from gracekv.allocate.top_tokens import candidates, largest
from gracekv.cache import RaggedCache, RaggedEntries
from gracekv.cache.base import LayerToPack
from gracekv.kernels.ragged import rows
from gracekv.pipeline.auction import Auction
from gracekv.pipeline.pipeline import Pipeline
from gracekv.pipeline.run import Run, finished, timed
from gracekv.precision import AllocatingPrecision
from gracekv.prefill import Prefill
from gracekv.segment.tokens import Tokens
from gracekv.value import Memory, Relevance, TokenScores


def why_whole(pipeline: Pipeline, plan: BudgetPlan, entry_bytes: int) -> str | None:
    """Why `pipeline` needs all layers at once, as the end of a sentence; None: it does not.

    Args:
        pipeline: what compresses.
        plan: what its budget comes to.
        entry_bytes: of a K/V pair as it is.
    """
    stages = ("value", "sensitivity", "quota", "fit")
    parts = [getattr(pipeline, stage) for stage in stages]
    compared = [
        f"{x.name!r} ({stage})" for stage, x in zip(stages, parts, strict=True) if not x.by_layer
    ]
    by_bytes = plan.bytes is not None and not pipeline.quota.monotone
    observers = pipeline.needs().observers
    passes, late = (any(x in y.reads for y in observers) for x in ("passes", "final"))
    tokens = isinstance(pipeline.segment, Tokens) and pipeline.keeps_or_drops
    reasons = {
        "it keeps everything": pipeline.keep_all or pipeline.precision.keeps_all(plan, entry_bytes),
        "it does more than choose among single tokens": not tokens or not pipeline.pack.by_entry,
        f"{' and '.join(compared)} compare layers": compared,
        "shares follow from how many entries its bytes buy, which is known last": by_bytes,
        "the model runs once more over all keys and values": passes,
        "it reads the decoder's output, which comes last": late,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class LayerwiseCompression:
    """The run of a pipeline for which `why_whole` is None, over layers that come ascending.

    Args:
        pipeline: what compresses.
        budget: what may stay.
    """

    def __init__(self, pipeline: Pipeline, budget: Budget) -> None:
        self._pipeline, self._budget = pipeline, budget
        self._memory: Memory = {}
        self._seconds: dict[str, float] = {}
        self._scores: list[Tensor] = []
        self._references: list[Any] = []
        self._measured: list[Any] = []
        self._packed: list[RaggedEntries] = []
        # Of each layer's packed entries in the region float64 [e] and int64 [e], see `_place`.
        self._gains: list[Tensor] = []
        self._places: list[Tensor] = []

    def layer(self, prefill: Prefill, layer: int) -> None:
        """Score a layer, and drop what can no longer be kept.

        Args:
            prefill: holds the tokens of this layer alone.
            layer: 0-based.
        """
        pipe, plan = self._pipeline, self._pipeline.plan(prefill, self._budget)
        region, home = prefill.spans.region(plan.recent), prefill.keys[0].device
        stage = partial(timed, prefill.keys[layer].device, self._seconds)
        with stage("value"):
            scores = pipe.value.layer(prefill, layer, region, self._memory)
            self._scores.append(scores.to(home, copy=True))
        with stage("fit"):
            self._references.append(pipe.fit.reference(prefill, layer, region, self._memory))
        with stage("precision"):
            if isinstance(pipe.precision, AllocatingPrecision):
                self._measured.append(pipe.precision.measured(prefill, layer, region))
        with stage("allocate"):
            caps = pipe.quota.layer(scores, layer, plan)
            if caps is not None:
                caps = prefill.shard.own_heads(caps, 0)
            gains, kept = candidates(scores, pipe.sensitivity(prefill)[layer], caps, pipe.elastic)
            # Decoding feeds the last prompt token again, so it is no entry.
            kept[:, prefill.spans.length - 1 - region.start :] = False
            head, token = kept.nonzero().unbind(1)
            self._gains.append(gains[kept].to(home))
            self._places.append(_place(prefill, layer, head, token + region.start).to(home))
            *below, own = self._best(prefill, plan.base)
            kept[kept.clone()] = own.to(kept.device)
            for number, stays in enumerate(below):
                packed = self._packed[number]
                if not bool(stays.all()):
                    mask = (packed.positions < region.start) | (packed.positions >= region.end)
                    mask[~mask] = stays.to(mask.device)
                    self._packed[number] = packed.where(mask)
        with stage("pack"):
            selection = Selection.of_tokens(kept[None], region.start)
            layout = selection.layout(0, prefill.spans.length, kept.device)
            given = LayerToPack(prefill, layer, layout, scores, pipe.prototype)
            self._packed.append(pipe.pack.layer(given))

    def _best(self, prefill: Prefill, budget: int) -> list[Tensor]:
        """bool [e] of each layer: which of its candidates are among the `budget` best so far.

        The others are forgotten. Over processes the best are those of all heads; finding them
        takes rounds of 128 bytes, see `gracekv.allocate.ranking`.
        """
        gains, places = torch.cat(self._gains), torch.cat(self._places)
        if prefill.shard.ranks > 1:
            heads, length = prefill.kv_heads, prefill.spans.length
            ties = prefill.shard.among_all(places // length, heads) * length + places % length
            stays = first_fitting(gains, ties, torch.ones_like(ties), budget, prefill.shard)
        else:
            # Layer, head and token ascend, so ties go to the earlier.
            stays = largest(gains, min(budget, len(gains)))
        masks = list(stays.split([len(x) for x in self._gains]))
        for held in (self._gains, self._places):
            held[:] = [own[mask] for own, mask in zip(held, masks, strict=True)]
        return masks

    def finish(self, prefill: Prefill) -> Run:
        """The run, once all layers have come; `prefill` needs no tokens any more."""
        pipe, plan = self._pipeline, self._pipeline.plan(prefill, self._budget)
        region, home = prefill.spans.region(plan.recent), prefill.keys[0].device
        with timed(home, self._seconds, "value"):
            scored = TokenScores.from_scores(torch.stack(self._scores), prefill.shard)
            self._scores.clear()
            omega = pipe.sensitivity(prefill)
            relevance = Relevance(scored.scores, scored.seed_scores, omega)
        quota = partial(pipe.quota, relevance.scores)
        auction = Auction(pipe, prefill, quota, relevance, measured=self._measured)

        def packed(selection: Selection) -> RaggedCache:
            layouts = selection.layouts(prefill.spans.length, prefill.keys)
            for number, layout in enumerate(layouts):
                held = self._packed[number]
                head = rows(held.lengths).to(held.positions.device)
                chosen = _place(prefill, number, layout.head, layout.start)
                mask = torch.isin(_place(prefill, number, head, held.positions), chosen)
                self._packed[number] = held.where(mask)
            return RaggedCache(tuple(self._packed), length=prefill.spans.length - 1)

        def fitted(cache: RaggedCache) -> RaggedCache:
            # What was noted of a layer is freed once it is fitted.
            layers = [pipe.fit.layer(x, self._references.pop(0), region) for x in cache.layers]
            return replace(cache, layers=tuple(layers))

        partition = pipe.segment(prefill, region)
        return finished(auction, plan, partition, packed, fitted, self._seconds)


def _place(prefill: Prefill, layer: int, head: Tensor, position: Tensor) -> Tensor:
    """int64 [e]: a number for each token of each head, ascending by layer, head and position."""
    return (layer * prefill.kv_heads + head) * prefill.spans.length + position.long()
