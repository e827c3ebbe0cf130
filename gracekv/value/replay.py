"""What the context's own queries would look at if they were asked again after the prompt.

An answer repeats words of its context, and while the model repeats a word its heads ask what they
asked when they first read it: mostly for what came after. The queries of that first reading were
captured; turned to the prompt's last position they see the whole context, the tokens behind their
own included, and show what a second reading would have shown (KVzip), without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from einops import rearrange
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.linalg import linear
from gracekv.prefill import Needs, Prefill, Region
from gracekv.prefill.column_sums import block_rows
from gracekv.prefill.needs import region_samples
from gracekv.rope import Rope
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.read_ahead import ReadAhead
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("replay")
@dataclass(frozen=True, slots=False)
class Replay(Scorer):
    """Attention of the context's queries, asked again after the prompt, likely words first.

    Root mean square over queries, so that a token that one of them needs outranks a token that all
    look at a little: dropping it changes one output much, and outputs err by squares. Half of the
    weight goes to queries whose tokens the prompt's end reads ahead to, half to all alike. A token
    is likely if in most layers some probe of some head points at it: in a list of answers each has
    pointers of its own, which a mean over probes and heads would drown.

    Source: ours; that a repetition shows what an answer will read is from Kim et al. (2025), KVzip,
    arXiv:2505.23416, which runs the model a second time for it.

    Cost: attention rows of at most `max_queries` context queries in every layer, O(L H Q T d), and
    the queries of every position must be captured.

    Attributes:
        evidence: what the likely words are found by: its maximum over a layer's heads, the mean
            over layers.
        power: exponent of that evidence: the larger, the fewer words hold its half of the weight.
        even: share of the weight that all queries have alike; 1 ignores the question.
        max_queries: most queries; of a longer context the likeliest words' and evenly spaced ones,
            half and half.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    evidence: ReadAhead = field(default_factory=lambda: ReadAhead(length=12, most=1.0))
    power: float = 4.0
    even: float = 0.5
    max_queries: int = 1024

    def __post_init__(self) -> None:
        if self.power <= 0 or not 0 <= self.even <= 1 or self.max_queries < 2:
            raise ConfigError(
                f"Replay takes power > 0, even from 0 to 1 and max_queries >= 2; got "
                f"power={self.power!r}, even={self.even!r}, max_queries={self.max_queries!r}."
            )

    def needs(self) -> Needs:
        """Evenly spaced queries of the context, and those of likely words, known later."""
        own = Needs(later_queries=True, context_samples=self.max_queries // 2)
        return own | self.evidence.needs()

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Root mean squares of attention, float32 [L, G, N], not normalised.

        Raises `MissingCaptureError` unless the queries of the context were captured.
        """
        at, weights = self.queries(prefill, region)
        prefill = prefill.with_queries(at)
        device = prefill.keys[0].device
        squares = [
            replayed_squares(prefill, layer, at, weights, region).to(device)
            for layer in range(prefill.layers)
        ]
        tokens = torch.stack(squares).sqrt()
        return TokenScores(tokens, mean_seed_scores(tokens))

    def queries(self, prefill: Prefill, region: Region) -> tuple[Tensor, Tensor]:
        """Positions that are asked again, int64 [Q] ascending on the CPU; weights [Q], sum 1."""
        seen = self.evidence(prefill, region).scores
        likely = seen.amax(dim=1).mean(dim=0).double().cpu() ** self.power
        count = min(self.max_queries, region.length)
        spaced = region_samples(region, self.max_queries // 2) - region.start
        # Ties toward the earlier token, as everywhere: a stable sort.
        order = likely.argsort(descending=True, stable=True)
        chosen = torch.zeros(region.length, dtype=torch.bool)
        chosen[spaced] = True
        chosen[order[~chosen[order]][: count - int(chosen.sum())]] = True
        every = torch.ones_like(likely) if count == region.length else torch.zeros_like(likely)
        every[spaced] = 1.0
        weights = (1 - self.even) * _share(torch.where(chosen, likely, 0.0))
        weights += self.even * _share(every)
        at = chosen.nonzero()[:, 0]
        return at + region.start, _share(weights[at]).float()


def _share(weights: Tensor) -> Tensor:
    return weights / weights.sum().clamp_min(1e-300)


def replayed_squares(
    prefill: Prefill,
    layer: int,
    at: Tensor,
    weights: Tensor,
    region: Region,
    *,
    block: int | None = None,
) -> Tensor:
    """sum_u w_u p_{u,t}^2 of queries asked again from the last position: float32 [G, N].

    The softmax runs over the whole prompt, nothing masked; the mean over a KV head's query heads is
    taken. Queries meet the keys in blocks.

    Args:
        prefill: H query heads over G KV heads, T tokens.
        layer: 0-based.
        at: int64 [Q] absolute positions whose queries are asked again.
        weights: [Q].
        region: the N tokens that are scored.
        block: queries at once; None: what suits the device.

    Raises `MissingCaptureError` if a query was not captured.
    """
    heads, length, group = prefill.kv_heads, prefill.spans.length, prefill.group
    keys = prefill.keys[layer].float()
    device = keys.device
    rope = Rope(prefill.rope.cos.to(device), prefill.rope.sin.to(device))
    last = torch.full_like(at, length - 1)
    share = (weights / group).to(device)
    block = min(block or block_rows(device, group, length), len(at))
    total = torch.zeros(heads, region.length, device=device)
    for first in range(0, len(at), block):
        some = at[first : first + block]
        plain = rope.unrotate(prefill.queries_at(layer, some).float() * prefill.scale, some)
        asked = rope.rotate(plain, last[: len(some)])
        asked = rearrange(asked, "(g n) q d -> g (n q) d", g=heads)
        rows = share[first : first + block].repeat(group)
        # Head by head: what one product makes is still in the cache when it is read again.
        for head in range(heads):
            logits = linear(asked[head], keys[head])
            chance = torch.softmax(logits, dim=-1, out=logits)
            total[head] += rows @ chance[:, region.start : region.end].square_()
    return total
