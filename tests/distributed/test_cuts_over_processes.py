"""A cut over the heads of several processes equals that of one process, down to ties."""

import pytest
import torch
from hypothesis import given

from gracekv.allocate.paths import buy_together
from gracekv.allocate.ranking import weighted_cut
from gracekv.allocate.top_tokens import top_tokens
from support.draws import SEEDS, bools, floats, some
from support.thread_exchange import in_threads


def own(shard, tensor):
    return None if tensor is None else shard.own_heads(tensor, 1)


@given(SEEDS, some([1, 2, 4]), bools(), bools(), floats(0, 1))
def test_top_tokens(seed, ranks, ties, capped, share):
    rng = torch.Generator().manual_seed(seed)
    layers, heads, tokens = 2, 4, int(torch.randint(1, 30, (), generator=rng))
    shape = (layers, heads, tokens)
    scores = torch.rand(shape, generator=rng)
    if ties:
        scores = torch.randint(0, 4, shape, generator=rng) / 3
    omega = torch.randint(1, 3, (layers, heads), generator=rng).float()
    budget = round(share * layers * heads * tokens)
    quota = torch.randint(0, tokens + 1, (layers, heads), generator=rng) if capped else None
    parts = in_threads(
        ranks,
        lambda shard: top_tokens(
            own(shard, scores), own(shard, omega), budget, own(shard, quota), shard=shard
        ),
    )
    assert torch.equal(torch.cat(parts, dim=1), top_tokens(scores, omega, budget, quota))


@given(SEEDS, some([2, 3]))
def test_weighted_cut_against_its_definition(seed, ranks):
    rng = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, 20, (), generator=rng))
    small = torch.randint(0, 6, (ranks, count), generator=rng)
    keys = torch.where(torch.rand(ranks, count, generator=rng) < 0.5, small, small << 50)
    weights = torch.randint(0, 4, (ranks, count), generator=rng)
    limit = int(torch.randint(0, 2 * count + 2, (), generator=rng))
    reached = {int(k): int(weights[keys >= k].sum()) for k in keys.flatten()}
    over = [k for k, weight in reached.items() if weight > limit]
    want = (max(over), int(weights[keys > max(over)].sum())) if over else None
    found = in_threads(ranks, lambda x: weighted_cut(keys[x.rank], weights[x.rank], limit, x))
    assert found == [want] * ranks


def test_processes_that_differ_are_told_apart():
    from gracekv.errors import RankError

    def run(shard):
        with pytest.raises(RankError, match="budget of process 1 is not that of process 0"):
            shard.agree(prompt=b"same", budget=b"4" if shard.rank == 1 else b"8")
        shard.agree(prompt=b"same")
        return shard.from_first(torch.arange(3 + shard.rank)).tolist()

    assert in_threads(3, run) == [[0, 1, 2]] * 3


def test_a_process_without_candidates_takes_part_in_the_floor():
    """Its list of prices is empty, but has the others' dtype."""

    def buy(shard):
        count = 3 if shard.rank == 0 else 0
        score = torch.tensor([0.9, 0.8, 0.7][:count], dtype=torch.float64)
        return buy_together(
            [*range(count)], [-1] * count, [2] * count, [0] * count, score=score,
            ties=torch.arange(count), budget=4, caps=[10], shard=shard,
        )  # fmt: skip

    assert in_threads(2, buy) == [[True, True, False], []]
