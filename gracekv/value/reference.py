"""The stage in float64 and plain loops, following the equations; slow on purpose.

A function named after a strategy takes it as its first argument, for its hyperparameters.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from gracekv.prefill import Prefill, Region, depth_layers
from gracekv.value.base import TokenScores
from gracekv.value.block_replay import BlockReplay
from gracekv.value.chunk_order import ChunkOrder
from gracekv.value.expected_attention import ExpectedAttention
from gracekv.value.multi_hop import MultiHop
from gracekv.value.output_projection import OutputProjection, ProjectedNorms, ProjectionNorms
from gracekv.value.read_ahead import ReadAhead
from gracekv.value.window_attention import WindowAttention


def attention_probability(prefill: Prefill, layer: int, head: int, probe: int) -> list[float]:
    """pi_{u,t} of one query head for t = 0..u (Eq. (V1))."""
    query = prefill.queries_at(layer, [probe])[head, 0].double()
    keys = prefill.keys[layer][head // prefill.group].double()
    return list(_shares(prefill, layer, head, keys[: probe + 1] @ query).tolist())


def _shares(prefill: Prefill, layer: int, head: int, products: Tensor) -> Tensor:
    """Attention of one query [t], from its products q.k [t]."""
    logits, cap = prefill.scale * products, prefill.softcap
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if not prefill.sink_logits:
        return logits.softmax(0)
    return torch.cat([logits, prefill.sink_logits[layer][head].to(logits)[None]]).softmax(0)[:-1]


def attention_sums(
    prefill: Prefill, layer: int, head: int, weights: dict[int, float], region: Region
) -> list[float]:
    """sum_u w_u pi_{u,t} of one query head for the region's tokens; `weights` maps u to w_u."""
    sums = [0.0] * region.length
    for probe, weight in weights.items():
        row = attention_probability(prefill, layer, head, probe)
        for t in range(region.start, min(region.end, probe + 1)):
            sums[t - region.start] += weight * row[t]
    return sums


def group_sums(prefill: Prefill, weights: dict[int, float], region: Region) -> Tensor:
    """[L, G, N] float64: `attention_sums` summed over the query heads of each KV head."""
    sums = torch.zeros(prefill.layers, prefill.kv_heads, region.length, dtype=torch.float64)
    for layer, head in product(range(prefill.layers), range(prefill.query_heads)):
        row = attention_sums(prefill, layer, head, weights, region)
        sums[layer, head // prefill.group] += torch.tensor(row, dtype=torch.float64)
    return sums


def _moved_query(prefill: Prefill, layer: int, head: int, probe: int, to: int) -> Tensor:
    """The query of one head at `probe`, rotated to position `to`: [d] float64."""
    rope, query = prefill.rope_of(layer).double(), prefill.queries_at(layer, [probe])[head].double()
    return rope.rotate(rope.unrotate(query, torch.tensor([probe])), torch.tensor([to]))[0]


def normalised(scores: list[float], epsilon: float) -> list[float]:
    """Scores over their sum plus epsilon."""
    total = sum(scores) + epsilon
    return [score / total for score in scores]


def mean_over_heads(tokens: Tensor, epsilon: float) -> list[float]:
    """S-hat from scores [L, G, N] (Eq. (V3))."""
    layers, heads, length = tokens.shape
    rows = [tokens[layer, head].tolist() for layer in range(layers) for head in range(heads)]
    return normalised([sum(row[t] for row in rows) / len(rows) for t in range(length)], epsilon)


def seeds(scores: list[float], mass: float, limit: int) -> list[int]:
    """Best tokens until their sum reaches `mass` of the total, at most `limit`; best first."""
    target, chosen, reached = mass * sum(scores), list[int](), 0.0
    for t in sorted(range(len(scores)), key=lambda t: (-scores[t], t)):
        if reached >= target or len(chosen) == limit or scores[t] <= 0:
            break
        chosen.append(t)
        reached += scores[t]
    return chosen


def propagated(
    scorer: MultiHop, prefill: Prefill, region: Region, seed_scores: list[float]
) -> list[float]:
    """d_t, Eqs. (V4) and (V5), before normalisation."""
    total, score, known = [0.0] * region.length, seed_scores, set[int]()
    for hop in range(scorer.hops):
        chosen = seeds(score, scorer.seed_mass, scorer.max_seeds)
        known.update(chosen)
        mass = sum(score[t] for t in chosen)
        weights = {region.start + t: score[t] / mass for t in chosen}
        score = [0.0] * region.length
        for layer in depth_layers(scorer.depths, prefill.layers):
            for head in range(prefill.query_heads):
                row = attention_sums(prefill, layer, head, weights, region)
                score = [a + b for a, b in zip(score, row, strict=True)]
        score = [0.0 if t in known else score[t] for t in range(region.length)]
        total = [d + scorer.decay**hop * found for d, found in zip(total, score, strict=True)]
    return total


def multi_hop(scorer: MultiHop, prefill: Prefill, region: Region) -> TokenScores:
    """R and S-hat, Eqs. (V2) to (V6); float64."""
    probes = prefill.spans.direct_probes(scorer.question_probes, scorer.tail_probes)
    direct = group_sums(prefill, dict.fromkeys(probes, 1.0), region)
    for layer, head in product(range(prefill.layers), range(prefill.kv_heads)):
        row = normalised(direct[layer, head].tolist(), scorer.epsilon)
        direct[layer, head] = torch.tensor(row, dtype=torch.float64)
    seed_scores = mean_over_heads(direct, scorer.epsilon)
    diffused = propagated(scorer, prefill, region, seed_scores)
    share = scorer.lambda_graph if sum(diffused) > 0 else 0.0
    hops = torch.tensor(normalised(diffused, scorer.epsilon), dtype=torch.float64)
    tokens = (1 - share) * direct + share * hops
    return TokenScores(tokens, torch.tensor(seed_scores, dtype=torch.float64))


def window_attention(scorer: WindowAttention, prefill: Prefill, region: Region) -> Tensor:
    """SnapKV's score [L, G, N] float64: mean over window and group, pooled inside the region."""
    spans, half = prefill.spans, scorer.kernel // 2
    window = [u for u in range(spans.length) if u >= spans.length - scorer.window]
    mean = group_sums(prefill, dict.fromkeys(window, 1 / (len(window) * prefill.group)), region)
    tokens = mean.clone()
    for layer, head in product(range(prefill.layers), range(prefill.kv_heads)):
        row = mean[layer, head].tolist()
        for t in range(region.length):
            near = row[max(0, t - half) : t + half + 1]
            if scorer.pooling == "max":
                tokens[layer, head, t] = max(near)
            elif scorer.pooling == "avg":
                tokens[layer, head, t] = sum(near) / scorer.kernel
    return tokens


def column_sums(prefill: Prefill, region: Region) -> Tensor:
    """H2O's score [L, G, N] from the full T x T attention of every head; float64."""
    everyone = dict.fromkeys(range(prefill.spans.length), 1 / prefill.group)
    return group_sums(prefill, everyone, region)


def chunk_order(scorer: ChunkOrder, scores: Tensor) -> list[list[list[int]]]:
    """ChunkKV's order of the tokens, [L][G][N], from token scores [L, G, N]."""
    layers, heads, length = scores.shape
    starts = range(0, length, scorer.chunk_size)
    chunks = [range(first, min(first + scorer.chunk_size, length)) for first in starts]
    orders: list[list[list[int]]] = []
    for layer in range(layers):
        rows = scores[layer].double().tolist()
        total = [sum(row[t] for row in rows) for t in range(length)]
        means = [sum(total[t] for t in chunk) / len(chunk) for chunk in chunks]
        best = sorted(range(len(chunks)), key=lambda c: (-means[c], c))
        inside = [sorted(chunks[c], key=lambda t: (-total[t], t)) for c in best]
        orders.append([[t for chunk in inside for t in chunk]] * heads)
    return orders


def expected_attention(scorer: ExpectedAttention, prefill: Prefill, region: Region) -> Tensor:
    """[L, G, N] float64: the closed form per key, with rotations averaged position by position.

    Needs a prompt that covers the future positions, since the table only holds positions used.
    """
    end, heads, dim = prefill.spans.context_end, prefill.query_heads, prefill.head_dim
    first, group = min(scorer.sinks, end - 1), prefill.group
    eye = torch.eye(dim, dtype=torch.float64)
    tokens = torch.zeros(prefill.layers, prefill.kv_heads, end, dtype=torch.float64)
    for layer in range(prefill.layers):
        table = prefill.rope_of(layer).double()
        ahead = range(end, end + scorer.future_positions)
        turns = [table.rotate(eye, torch.full((dim,), position)) for position in ahead]
        turn = sum(turns[1:], turns[0]) / len(turns)
        shares = torch.zeros(heads, end, dtype=torch.float64)
        for head in range(heads):
            queries = prefill.queries_at(layer, range(first, end))[head].double()
            plain = table.unrotate(queries, torch.arange(first, end))
            mean, covariance = plain.mean(0) @ turn, torch.cov(plain.T, correction=0)
            covariance = turn.T @ covariance.reshape(dim, dim) @ turn
            for t in range(first, end):
                key = prefill.scale * prefill.keys[layer][head // group, t].double()
                shares[head, t] = math.exp(float(key @ mean + key @ covariance @ key / 2))
            shares[head] /= shares[head].sum()
        for g in range(prefill.kv_heads):
            score = shares[g * group : (g + 1) * group].mean(0) + scorer.epsilon
            if scorer.value_norm:
                score *= prefill.values[layer][g, :end].double().norm(dim=-1)
            tokens[layer, g] = score
        tokens[layer, :, :first] = tokens[layer, :, first:].max() + 1
    return tokens[..., region.start : region.end]


def output_projection(sensitivity: OutputProjection, prefill: Prefill) -> Tensor:
    """Omega [L, G] float64, Eqs. (V7) and (V8).

    Raises `MissingCaptureError` if the prefill lacks the projections' norms.
    """
    static_norms = prefill.observation(ProjectionNorms())
    projected = prefill.observation(ProjectedNorms())
    raw = torch.zeros(prefill.layers, prefill.kv_heads, dtype=torch.float64)
    for layer, g in product(range(prefill.layers), range(prefill.kv_heads)):
        group = range(g * prefill.group, (g + 1) * prefill.group)
        static = math.sqrt(sum(float(static_norms[layer, h]) ** 2 for h in group))
        dynamic = [float(norm) for norm in projected[layer, g]]
        raw[layer, g] = math.sqrt(static * sum(dynamic) / len(dynamic))
    return raw / (float(raw.sum()) / raw.numel() + sensitivity.epsilon)


def read_ahead(scorer: ReadAhead, prefill: Prefill, region: Region) -> Tensor:
    """[L, G, N] float64, with each token's weighted sum computed separately."""
    probes = prefill.spans.direct_probes(scorer.question_probes, scorer.tail_probes)
    mean = torch.zeros(prefill.layers, prefill.kv_heads, region.length, dtype=torch.float64)
    maximum = torch.zeros_like(mean)
    for layer, head in product(range(prefill.layers), range(prefill.query_heads)):
        for probe in probes:
            row = attention_probability(prefill, layer, head, probe)
            for t in range(region.start, min(region.end, probe + 1)):
                share, place = row[t] ** scorer.power, t - region.start
                mean[layer, head // prefill.group, place] += share / len(probes) / prefill.group
                maximum[layer, head // prefill.group, place].clamp_(min=share)
    score = (1 - scorer.max_weight) * mean + scorer.max_weight * maximum
    ahead = torch.zeros_like(score)
    for t in range(region.length):
        for i in range(t + 1):
            ahead[..., t] += (1 - 1 / scorer.lookahead) ** i * score[..., t - i] / scorer.lookahead
    return ahead ** (1 / scorer.power)


def block_replay(scorer: BlockReplay, prefill: Prefill, region: Region) -> Tensor:
    """[L, G, N] float64: power means of attention from queries moved to their block's end."""
    block, power, spans = scorer.block, scorer.mean_power, prefill.spans
    total = torch.zeros(prefill.layers, prefill.kv_heads, spans.length, dtype=torch.float64)
    for layer, head in product(range(prefill.layers), range(prefill.query_heads)):
        keys, following = prefill.keys[layer][head // prefill.group].double(), list[Tensor]()
        for u in range(spans.context_start, spans.context_end):
            start = u - (u - spans.context_start) % block
            end = min(start + block, spans.context_end)
            moved = _moved_query(prefill, layer, head, u, end - 1)
            asked = [t for t in range(end) if t < 4 or end - block <= t]
            near = keys[max(start, u - scorer.near + 1) : u + 1]
            query = prefill.queries_at(layer, [u])[head, 0].double()
            products = torch.cat([keys[asked] @ moved, near @ query])
            row = _shares(prefill, layer, head, products)[: len(asked)]
            row = row * (torch.tensor(asked) >= (end - block if end - block > 4 else 0))
            total[layer, head // prefill.group, asked] += row**power / prefill.group
            if u < end - 1 and start == spans.context_start:
                following.append(row[asked.index(u + 1)])
        if following:
            read = torch.stack(following).mean() ** power / prefill.group
            total[layer, head // prefill.group, spans.context_start :] += scorer.induction * read
    return (total[..., region.start : region.end] / region.length).pow(1 / power)


def replay(
    prefill: Prefill, at: Tensor, weights: Tensor, region: Region, power: float = 2.0
) -> Tensor:
    """[L, G, N] float64: power means over u of p_{u,t}, queries `at` moved to the last position."""
    last = prefill.spans.length - 1
    total = torch.zeros(prefill.layers, prefill.kv_heads, region.length, dtype=torch.float64)
    for layer, head in product(range(prefill.layers), range(prefill.query_heads)):
        keys = prefill.keys[layer][head // prefill.group].double()
        for u, weight in zip(at.tolist(), weights.tolist(), strict=True):
            moved = _moved_query(prefill, layer, head, u, last)
            row = _shares(prefill, layer, head, keys @ moved)[region.start : region.end]
            total[layer, head // prefill.group] += weight * row**power / prefill.group
    return total.pow(1 / power)


def pursued(mass: Tensor, most: int, largest: float) -> list[int]:
    """Tokens of one head in the order of `MatchingPursuit`, for attention mass [M, N] in float64.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284.
    """
    taken: list[int] = []
    target = mass.double().sum(dim=1)
    missing = target
    for _ in range(min(most, *mass.shape)):
        gain = (mass.double().T @ missing).tolist()
        left = [token for token in range(len(gain)) if token not in taken]
        taken.append(max(left, key=lambda token: gain[token]))
        columns = mass.double()[:, taken]
        solution = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        missing = target - columns @ solution.clamp(1e-12, largest)
    return taken
