"""Estimates a second pass's attention, block by block during the first pass.

When a model repeats a text, its heads produce nearly the same queries as in the first pass, and
attend mostly to what followed. So the queries of each block of context tokens are moved to the
block's end, from which they see the whole block. A second pass also sees what it has just read: a
copy of the token itself and of those before it. These stay at their old distance and take their
share of attention, so heads that attend only to near tokens give the block no score.

The first pass misses one thing: in a copy, induction heads (Olsson et al. 2022, arXiv:2209.11895)
read the token after the one that they copy, however often it occurs, and need all tokens for it.
The first pass does show which heads these are: their moved queries attend to the token after their
own. So each token may get, in addition to its sums, the attention that one more query of that head
would pay on average, estimated from the first block.

A passage that follows packed entries is short, and later queries come from farther away. So its
queries are moved beyond its end by its own length, at most 256 tokens; otherwise its last tokens
would be kept just for being near. Its queries also score the entries before it, in the same unit.

A block's keys and queries are available while the prefill runs, so nothing is held longer, and the
cost is linear in the prompt's length.

Source: ours; the idea that repeating the context shows what an answer will attend to is from Kim et
al. (2025), KVzip, arXiv:2505.23416, which runs the model a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn import functional

from gracekv.kernels.device import obstacle
from gracekv.kernels.linalg import capped
from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.kernels.uploads import on_device
from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.needs import region_samples
from gracekv.prefill.observer import Accumulator, LayerObserver, TokenColumns, TokenRun
from gracekv.prefill.spans import first_entries, without_zeros
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer

# First tokens of the prompt, which many heads use as attention sinks.
SINKS = 4
# Minimum number of queries that share a window of near tokens.
_ROWS = 32
# Maximum distance by which a passage's queries are moved beyond its end. Source: ours.
_BEYOND = 256
# Number of queries that measure how much a head reads the token after its own. Source: ours.
_SAMPLES = 64


@dataclass(frozen=True)
class BlockReplaySums(LayerObserver):
    """Sums of attention p^power over the queries of each block, float32 [L, G, T].

    Attributes:
        block: context tokens whose queries are moved together.
        power: exponent of attention, at least 1.
        near: how many tokens of the second pass, its own included, a query sees in addition to the
            block, or 0.
        induction: how many more queries read each token as induction heads do.
    """

    block: int
    power: float
    near: int = 0
    induction: float = 0.0

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, prefill.spans.length

    def seen(self, spans: PromptSpans) -> Region:
        return Region(max(spans.context_start, spans.past), spans.context_end)

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _BlockSums(self, spans)

    def add_block(
        self, total: Tensor, queries: Tensor, block: Region, run: TokenRun, spans: PromptSpans
    ) -> None:
        """Add sum_u p_{u,t}^power of a block's queries to `total`; mean over a KV head's queries.

        The softmax runs over the prompt's first 4 tokens, the `block` keys up to the block's end (a
        short last block includes keys of the one before), and the near tokens, which get no
        columns. The first block's queries also measure what induction heads read.

        Args:
            total: float32 [G, T], changed in place; on the keys' device.
            queries: [H, n, d] post-RoPE, of the block's n tokens.
            block: its place in the context.
            run: its keys reach at least to the block's end.
            spans: of the prompt; queries of a passage see and score all places before it.
        """
        past, keys, context = spans.past, run.keys, self.seen(spans)
        induces = self.induction and block.start == context.start and block.length > 1
        moved, scale, sinks = self._moved(queries, block, run, past)
        first, before = block.end - self.block, max(SINKS, past)
        starts, at_once = first_entries(keys, past), len(keys)
        if any(starts):
            # Heads with padding are summed one by one, each over its own entries.
            at_once, keys, moved = 1, without_zeros(keys), without_zeros(moved)
        group = len(moved) // len(keys)
        for head, start in list(enumerate(starts))[::at_once]:
            own, rows = slice(head, head + at_once), slice(head * group, (head + at_once) * group)
            lead, after = (before, first) if first > before else (start, start)
            seen = keys[own, after : block.end]
            if lead > start:
                seen = torch.cat([keys[own, start:lead], seen], dim=1)
            asked = moved[rows]
            own_sinks = None if sinks is None else sinks[rows]
            args = run.softmax_args | {"scale": scale, "sinks": own_sinks}
            columns = softmax_columns(asked, seen, seen.shape[1], power=self.power, **args)
            columns = reduce(columns, "(g n) t -> g t", "mean", g=at_once)
            total[own, after : block.end].add_(columns[:, lead - start :])
            if induces:
                read = next_attention(asked, seen, **args)
                read = reduce(read**self.power, "(g n) -> g 1", "mean", g=at_once)
                total[own, context.start : context.end].add_(read, alpha=self.induction)
            if start < past <= lead:
                total[own, start:past].add_(columns[:, : past - start])

    def _moved(
        self, queries: Tensor, block: Region, run: TokenRun, past: int
    ) -> tuple[Tensor, float, Tensor | None]:
        """A block's queries [H, n, d], moved to its end, or beyond the end of a passage; float32.

        Also returns the scale that their logits still lack, and the logits of what takes part in
        their softmax without columns, sinks and near tokens: [H], [H, n] or None.
        """
        softcap, sinks, scale = run.softcap, run.sinks, 1.0
        turn = run.rope.moved(slice(block.start, block.end), block.end - 1)
        keys, beside = run.keys[:, block.start : block.end], None
        if self.near and softcap is None and _reads(queries, keys):
            from gracekv.kernels.block_queries_triton import moved_and_near

            scale = run.scale
            moved, beside = moved_and_near(queries, keys, turn, self.near, scale)
        else:
            asked = queries.float() * run.scale
            moved = turn.rotate(asked, None)
            beside = near_logits(asked, keys, self.near, softcap) if self.near else None
        if beside is not None:
            sinks = beside if sinks is None else torch.logaddexp(beside, sinks.to(beside)[:, None])
        if past:
            # Rotations add up, and the table ends with the prompt.
            one, to = slice(block.start, block.start + 1), min(block.start + _BEYOND, block.end - 1)
            moved = run.rope.moved(one, to).rotate(moved, None)
        return moved, scale, sinks


class _BlockSums(TokenColumns):
    """The sums of one layer. Queries are held until their block is complete: one block at most."""

    def __init__(self, replay: BlockReplaySums, spans: PromptSpans) -> None:
        super().__init__(spans)
        self._replay = replay
        self._waiting: Tensor | None = None

    def add(self, run: TokenRun) -> None:
        total = self.columns(run.keys)
        for block in self._replay.seen(self.spans).parts(self._replay.block):
            start, stop = max(block.start, run.start), min(block.end, run.end)
            if start >= stop:
                continue
            rows = run.queries[:, start - run.start : stop - run.start]
            if stop - start < block.length:
                if self._waiting is None:
                    self._waiting = rows.new_empty(rows.shape[0], block.length, rows.shape[2])
                self._waiting[:, start - block.start : stop - block.start] = rows
                rows = self._waiting
            if stop == block.end:
                self._replay.add_block(total, rows, block, run, self.spans)
                self._waiting = None


@SCORERS.register("block_replay", works_sharded=True)
class BlockReplay(Scorer):
    """Power mean of attention from all context queries, moved to the end of their block.

    The question is not read. `replay` replays chosen queries over the whole prompt; this replays
    all of them over their block and the prompt's first tokens. That matters for tokens that only
    one query looks for: a digit of an identifier is read by the query of the token before it.

    Source: ours; the idea that repeating the context shows what an answer will attend to, and that
    blocks of some 2,000 tokens do, is from Kim et al. (2025), KVzip, arXiv:2505.23416, which runs
    the model a second time.

    Cost: one attention pass without values over blocks, O(L H T block d), and one over near
    tokens, O(L H T near d), during the prefill; one block of queries is held meanwhile.

    Attributes:
        block: tokens that are replayed together.
        mean_power: exponent of the mean over queries: 2 is the root mean square; larger ones come
            closer to the maximum, for texts in which each token is read by one query.
        near: how many tokens of the second pass itself take part in the softmax, the query's own
            and those before it: they satisfy heads that only look at near tokens. May be 0.
        induction: how many more queries read each token, each with the mean attention that its
            head's queries in the first block pay to the token after their own. May be 0.
    """

    reads_past = True

    block: int = bounded(2048, at_least=1)
    mean_power: float = bounded(3.0, at_least=1)
    near: int = bounded(64, at_least=0, hint="0: the block alone.")
    induction: float = bounded(0.0, at_least=0, hint="0.05 keeps what is copied; 1 hurts prose.")

    def needs(self) -> Needs:
        """The sums, computed during the capture."""
        return Needs.observed(self._sums)

    @property
    def _sums(self) -> BlockReplaySums:
        return BlockReplaySums(self.block, self.mean_power, self.near, self.induction)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Power means of attention [G, N], not normalised."""
        asked = region.end - max(region.start, capture.spans.context_start)
        inside = capture.observation(self._sums)[:, region.start : region.end] / asked
        return inside.pow(1 / self.mean_power).to(capture.keys.device)


def next_attention(
    queries: Tensor, keys: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Mean attention that n >= 2 tokens' moved queries pay to the token after their own: [H].

    Uses at most 64 of them, evenly spaced; arguments and softmax as in `softmax_columns`.

    Args:
        queries: float32 [H, n, d].
        keys: [G, T, d]; the last n are the tokens' own.
        scale: scale of the logits.
        softcap: logit softcap, or None.
        sinks: logits of attention sinks, [H] or [H, n], or None.
    """
    count = queries.shape[1]
    row = region_samples(Region(0, count - 1), _SAMPLES)
    at, after = (on_device(x, queries.device) for x in (row, row + (keys.shape[1] - count + 1)))
    asked = rearrange(queries[:, at] * scale, "(g n) q d -> g (n q) d", g=len(keys))
    # torch's own product: oneDNN compiles for each size, and heads of a passage all differ in size.
    logits = capped(asked @ keys.float().mT, softcap).view(len(queries), len(at), -1)
    if sinks is not None:
        own = sinks[:, at] if sinks.ndim > 1 else sinks[:, None].expand(-1, len(at))
        logits = torch.cat([logits, own[..., None].to(logits)], dim=2)
    torch.softmax(logits, dim=2, out=logits)
    return logits.gather(2, after.expand(len(queries), -1)[..., None]).mean(dim=(1, 2))


def _reads(queries: Tensor, keys: Tensor) -> bool:
    """Whether a GPU kernel handles these."""
    plain = type(queries) is type(keys) is Tensor and queries.dtype == keys.dtype != torch.float64
    return plain and keys.device.type != "cpu" and obstacle(keys.device, "torch") is None


def near_logits(queries: Tensor, keys: Tensor, near: int, softcap: float | None = None) -> Tensor:
    """Log-sum-exp of each query's logits to its own token and the `near` - 1 before it: [H, n].

    Args:
        queries: float32 [H, n, d], times the scale; of n tokens in a row.
        keys: [G, n, d], of the same tokens, rotated alike.
        near: number of tokens; fewer at the start.
        softcap: logit softcap, or None.
    """
    count, rows, back = queries.shape[1], max(near // 2, _ROWS), near - 1
    blocks = -(-count // rows)
    more = blocks * rows - count
    asked_at = torch.arange(count + more, device=keys.device).view(blocks, 1, rows, 1)
    seen_at = asked_at[:, :, :1] - back + torch.arange(rows + back, device=keys.device)
    hidden = (seen_at < 0) | (seen_at > asked_at) | (seen_at < asked_at - back)
    totals = []
    # Each block of `rows` queries sees one window of keys; there is nothing before the first key.
    # One KV head at a time, so that its logits fit in a CPU's cache.
    for own, asked in zip(keys.float(), queries.unflatten(0, (len(keys), -1)), strict=True):
        windows = functional.pad(own, (0, 0, back, more)).unfold(0, rows + back, rows)
        some = functional.pad(asked, (0, 0, 0, more)).unflatten(1, (blocks, rows)).transpose(0, 1)
        logits = capped(some.flatten(1, 2) @ windows, softcap).unflatten(1, (-1, rows))
        logits.masked_fill_(hidden, -torch.inf)
        # x - log_softmax(x) of the own token: logsumexp takes five passes on a CPU, this takes one.
        total = logits.diagonal(back, 2, 3) - logits.log_softmax(dim=-1).diagonal(back, 2, 3)
        totals.append(total.transpose(0, 1).flatten(1)[:, :count])
    return torch.cat(totals)
