"""A cut: one auction over all layers and heads of a sequence, and packing of the kept entries.

`gracekv.hf.limited` calls this module when the next step would exceed the limit: it passes its
layers one by one as `HeldLayer` and replaces them with the packed entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan, equal_shares
from gracekv.allocate.ranking import where_true
from gracekv.allocate.top_tokens import top_tokens
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.decode.base import Decoder, HeldLayer
from gracekv.decode.limit import Limit
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import BudgetError, NonFiniteError
from gracekv.fit.base import check_dtype
from gracekv.kernels import ragged


def kept_entries(
    layers: int, held: Callable[[int], HeldLayer], strategy: Decoder, budget: int, window: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The entries that stay, bool [G, N] by layer, and all scores [G, N]; N differs by layer.

    Strategies that read queries use the carried scores until there is a query. The last `window`
    positions and a kept prompt always stay, and other entries that the strategy guards if there is
    room. Ties go to the earlier layer, head and entry.

    Args:
        layers: L.
        held: makes the `HeldLayer` of a layer; called once per layer, in order.
        strategy: scores the entries.
        budget: maximum entries in all layers and heads.
        window: how many of the last tokens stay.

    Raises `NonFiniteError` if the strategy's scores hold NaN or -inf.
    """
    scores, gains = list[Tensor](), list[Tensor]()
    for number in range(layers):
        layer = held(number)
        blind = strategy.queries and not layer.moved.shape[2]
        own = layer.carried if blind else strategy.scores(layer)
        recent = layer.positions >= layer.now - window
        stays = recent | own.isposinf() | (layer.positions < layer.prompt) & strategy.keep_prompt
        scores.append(own)
        gain = own.double().masked_fill(strategy.guarded(layer, budget // layers), torch.inf)
        gains.append(gain.masked_fill(stays, -torch.inf).masked_fill(~layer.used, torch.nan))
    width = max(x.shape[1] for x in gains)
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=torch.nan) for x in gains]
    # Layers may be on several GPUs; the auction runs on that of the first.
    every = torch.stack([x.to(gains[0].device) for x in padded])
    finite = every[every.isfinite()]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    # Scores map to [1, 2], guarded entries to 3, those that must stay to 4, dropped ones to 0.
    scaled = 1 + (every - low) / max(float(high - low), 1e-300)
    scaled = scaled.nan_to_num_(nan=0.0, posinf=3.0, neginf=4.0)
    quota = None
    if strategy.per_head:
        shares = equal_shares(BudgetPlan(layers, every.shape[1], width, budget, 0))
        quota = shares.maximum(every.isneginf().sum(dim=2).to(shares.device))
    # The auction rejects NaN; this is the only synchronisation with a GPU.
    sound = torch.stack([(x > -torch.inf).all(dim=1).to(every.device) for x in scores])
    weights = sound.float().masked_fill_(~sound, torch.nan)
    try:
        kept = top_tokens(scaled, weights, budget, quota, elastic=True)
    except NonFiniteError as error:
        raise NonFiniteError(
            f"The decode strategy {strategy.name!r} gave scores of NaN or -inf. If it reads "
            f"queries, its field `queries` says how many are recorded; it is {strategy.queries}."
        ) from error
    return [own[:, : x.shape[1]].to(x.device) for own, x in zip(kept, gains, strict=True)], scores


def entries_within(
    limit: Limit,
    cache: RaggedCache,
    scores: Sequence[Tensor],
    shard: HeadShard = WHOLE,
    known: int | None = None,
) -> list[Tensor] | None:
    """The entries of one sequence that fit a limit, bool [E] by layer; None if all fit.

    They are those with the highest scores, and all with a score of inf. Ties go to the earlier
    layer, head and entry. The limit's window is left free.

    Args:
        limit: limit over all heads, including those of other processes.
        cache: the entries.
        scores: [E] by layer.
        shard: the KV heads of this process.
        known: number of positions that the model knows, if gaps are to be closed: a head then holds
            at most half as many entries, plus those with a score of inf. None for any number.

    Raises `BudgetError` if the limit is too small for the entries that must stay.
    """
    lengths, one = cache.entries(), cache.layers[0]
    units, entry_bytes = lengths.numel() * shard.ranks, 2 * one.dim * one.dtype.itemsize
    target = limit.target(cache.length + 1, units, entry_bytes) // units
    most, longest = units * max(0, target - limit.window), int(shard.maximum(lengths.amax()))
    if (known is None or longest <= known // 2) and shard.total(int(lengths.sum())) <= most:
        return None
    used = torch.arange(longest, device="cpu") < lengths[..., None]
    gains = torch.zeros_like(used, dtype=torch.float32)
    # In the elastic auction, an entry needs a larger gain than padding.
    gains[used] = torch.cat(list(scores)).float().cpu().clamp(min=torch.finfo(torch.float32).tiny)
    stays = gains.isinf()
    if (left := most - shard.total(int(stays.sum()))) < 0:
        raise BudgetError(
            f"The limit leaves {most // units} entries per head in addition to its window, but "
            f"{-(-(most - left) // units)} uncompressed entries must stay. Raise the limit."
        )
    ones = torch.ones_like(lengths, dtype=torch.float32)
    quota = None if known is None else torch.full_like(lengths, known // 2)
    kept = top_tokens(gains.masked_fill(stays, 0.0), ones, left, quota, elastic=True, shard=shard)
    return list((kept | stays)[used].split([len(own) for own in scores]))


def packed_entries(held: HeldLayer, kept: Tensor, strategy: Decoder) -> RaggedEntries:
    """Pack the entries `kept` bool [G, N] of one layer, fitted by `strategy`.

    Raises `ShapeError` if it returns values of another dtype.
    """
    at = where_true(kept.flatten())
    keys, values = (x.flatten(0, 1).index_select(0, at) for x in (held.keys, held.values))
    positions, log_m = held.positions.flatten()[at].int(), held.log_multiplicity.flatten()[at]
    packed = RaggedEntries(keys, values, positions, log_m, ragged.offsets(kept.sum(dim=1).cpu()))
    fitted = strategy.fit(held, kept, packed)
    check_dtype(strategy, packed, fitted)
    return fitted
