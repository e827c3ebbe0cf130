"""`singleton`: exact tokens, and the paths to them, bought before the auction."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.base import FLOORS, Floor, Frontier
from gracekv.allocate.operations import Operations, check_quota
from gracekv.allocate.paths import buy_together
from gracekv.allocate.plan import BudgetPlan
from gracekv.allocate.ranking import where_true
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import ShapeError
from gracekv.kernels.compiled import numba_obstacle
from gracekv.kernels.linalg import running_sums
from gracekv.kernels.ragged import rows_and_steps
from gracekv.registry import bounded
from gracekv.tree.base import Forest

# Number of operations from which the compiled walk is used: below, Python takes less than 20 ms,
# and loading the kernel takes longer.
_COMPILED = 20_000


@FLOORS.register("singleton", works_sharded=True)
class Singleton(Floor):
    """Protect the most relevant tokens, with max pooling and consensus among heads.

    Source: Eqs. (A2), (A3) and (A4) and the appendix on floor construction. Ours: `head_cap`, the
    tie order (layer, head, token), that a head whose best token passes the threshold keeps that
    candidate even if its relevance alone exceeds `eta`, and that both thresholds are relative to
    the scores, so their scale does not matter.

    Cost: one max pooling and one sort of R [L, G, N], then a walk from each candidate to its root
    on the host, compiled if numba is installed.

    Attributes:
        alpha: the floor spends at most this share of B_base (paper 0.6).
        gamma: a candidate's score is at least gamma times the mean of R over all tokens and heads,
            which is 1 / N_c if each head's R sums to 1, as in the paper (paper 1.2).
        eta: a head's candidates stop before their summed relevance exceeds this share of the head's
            (paper 0.95).
        consensus: c, weight of the mean over all heads in the score (paper 0.5).
        pool: odd width of the max pooling in tokens (paper 7).
        head_cap: no head's floor costs more than this many equal shares of the floor's budget
            (ours 2.0; the paper has such a cap but not its value).
    """

    alpha: float = bounded(0.6, at_least=0, at_most=1, hint="Without a floor use the floor 'none'.")
    gamma: float = bounded(1.2, at_least=0)
    eta: float = bounded(0.95, at_least=0, at_most=1)
    consensus: float = bounded(0.5, at_least=0, at_most=1)
    pool: int = bounded(7, at_least=1, odd=True, hint="Use 1 for no pooling.")
    head_cap: float = bounded(2.0, above=0)

    def limit(self, plan: BudgetPlan) -> int:
        """Entries that the floor may cost in total, floor(alpha B_base), exactly."""
        return math.floor(Fraction(str(self.alpha)) * plan.base)

    def head_limit(self, plan: BudgetPlan) -> int:
        """Entries that one head's floor may cost, floor(head_cap alpha B_base / (L G))."""
        caps = Fraction(str(self.head_cap)) * Fraction(str(self.alpha))
        return math.floor(caps * plan.base / (plan.layers * plan.heads))

    def candidates(
        self, scores: Tensor, plan: BudgetPlan, shard: HeadShard = WHOLE
    ) -> Tensor | None:
        if (limit := self.limit(plan)) <= 0:
            return None
        relevance = scores.double()
        # f: relevance mixed with its mean over heads, then max pooled.
        mean = shard.mean(relevance.mean(dim=(0, 1)))
        mixed = (1 - self.consensus) * relevance + self.consensus * mean
        score = torch.nn.functional.max_pool1d(mixed, self.pool, stride=1, padding=self.pool // 2)
        order = score.sort(dim=-1, descending=True, stable=True)
        # Tokens with a score of 0 are not candidates.
        passes = order.values >= (self.gamma * mean.mean()).clamp(min=1e-300)
        sums = running_sums(relevance.gather(-1, order.indices))
        within = sums <= self.eta * sums[..., -1:]
        # Scores fall and sums rise along the order, so both conditions hold on a prefix.
        counts = (passes & within).sum(-1).maximum(passes[..., 0].long())
        if (total := shard.total(int(counts.sum()))) > limit:
            counts = torch.where(counts > 0, (counts * limit // total).clamp(min=1), 0)
        best = torch.arange(scores.shape[-1], device=relevance.device) < counts[..., None]
        best_scores = torch.where(best, order.values, -torch.inf)
        return torch.full_like(score, -torch.inf).scatter_(-1, order.indices, best_scores)

    def realize(
        self, forest: Forest, candidates: Tensor | None, plan: BudgetPlan, quota: Tensor | None
    ) -> Frontier:
        """Buy the paths to the candidates by descending score; ties by layer, head, token.

        A candidate that the forest cannot make exact (its leaf was pruned) is skipped. Raises
        `ShapeError` unless `candidates` is [L, G, N] of this forest.
        """
        start = Frontier.empty(forest, plan.base)
        if candidates is None:
            return start
        ops = Operations.of(forest)
        caps = torch.full((forest.layers, forest.heads), self.head_limit(plan), device="cpu")
        if (quota := check_quota(quota, forest.layers, forest.heads)) is not None:
            caps = caps.minimum(quota.long().cpu())
        executed = torch.zeros(len(ops), dtype=torch.bool, device=ops.cost.device)
        last, place = _last_operation(ops, candidates)
        score = candidates.flatten()[place]
        limits = self.limit(plan), caps.flatten().tolist()
        executed[_buy_paths(ops, last, score, place, *limits)] = True
        spent = int(torch.where(executed, ops.cost, 0).sum())
        return dataclasses.replace(ops.frontier(start, executed), floor_spent=spent)


def _last_operation(ops: Operations, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The operation that makes each candidate exact, by order of purchase, and its candidate.

    Both int64 [n]; indices are flat, into `candidates` [L, G, N].
    """
    forest = ops.forest
    first, end = forest.region
    tokens = end - first
    expected = (forest.layers, forest.heads, tokens)
    if tuple(candidates.shape) != expected:
        raise ShapeError(
            f"Floor candidates must be [L, G, N] = {list(expected)} for this forest; got "
            f"{list(candidates.shape)}. Take candidates and forest from one plan."
        )
    flat = candidates.flatten().to(ops.cost.device)
    # Exact nodes have as many entries as tokens: singletons, and nodes kept unmerged.
    exact = where_true(forest.entries == forest.length)
    row, within = rows_and_steps(forest.length[exact])
    holder = exact[row]
    place = forest.head_of_node()[holder] * tokens + forest.start[holder] - first + within
    node_of = torch.full_like(flat, -1, dtype=torch.int64)
    node_of[place] = holder
    flat_index = where_true((flat > -torch.inf) & (node_of >= 0))
    flat_index = flat_index[torch.sort(flat[flat_index], descending=True, stable=True).indices]
    node = node_of[flat_index]

    # A root is created by its own Add, any other node by its parent's Split.
    split_of = torch.full((forest.nodes,), -1, device=node.device)
    split_of[ops.node[forest.trees :]] = torch.arange(forest.trees, len(ops), device=node.device)
    return torch.where(node < forest.trees, node, split_of[forest.parent[node]]), flat_index


def _buy_paths(
    ops: Operations, last: Tensor, score: Tensor, place: Tensor, budget: int, caps: list[int]
) -> Tensor:
    """int64: operations executed if each path up from `last` is bought completely or not at all.

    One path after the other, in the order of `last` [n], whose candidates have `score` [n] and
    index `place` [n]; `caps` are entries left in each head.
    """
    # Only the paths' operations are numbered and copied to the host.
    marked = torch.zeros(len(ops) + 1, dtype=torch.bool, device=last.device)
    marked.index_fill_(0, last, True)
    # The parent of the topmost is an extra element after the last operation.
    above = torch.where(ops.parent < 0, len(ops), ops.parent)
    above, at = torch.cat([above, above.new_full((1,), len(ops))]), last
    for _ in ops.bounds[2:]:
        at = above[at]
        marked.index_fill_(0, at, True)
    local = where_true(marked[:-1])
    order = torch.searchsorted(local, last).cpu().numpy()
    facts = torch.stack([ops.parents_among(local), ops.cost[local], ops.head(local)]).cpu().numpy()
    shard, done = ops.forest.shard, np.zeros(len(local), dtype=bool)
    if shard.ranks == 1 and len(local) >= _COMPILED and numba_obstacle() is None:
        from gracekv.allocate.paths_numba import buy_paths

        buy_paths(order, *facts, budget, np.array(caps, np.int64), done, np.zeros_like(order))
    else:
        first, end = ops.forest.region
        ties = shard.among_all(place, ops.forest.heads * (end - first))
        rows = (x.tolist() for x in (order, *facts))
        done[:] = buy_together(*rows, score=score, ties=ties, budget=budget, caps=caps, shard=shard)
    return local[torch.from_numpy(np.flatnonzero(done)).to(local.device)]
