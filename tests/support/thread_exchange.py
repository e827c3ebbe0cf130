"""Processes that share a model, simulated by threads of one process."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

from gracekv.distributed import HeadShard
from gracekv.errors import RankError


class _ThreadExchange:
    """Like `GlooExchange`: a rank's n-th input meets the others' n-th inputs, or a failure."""

    def __init__(self, posts, changed, rank):
        self.posts, self.changed, self.rank = posts, changed, rank

    def __call__(self, tensor):
        number = self._post(tensor)
        with self.changed:
            there = self.changed.wait_for(lambda: min(map(len, self.posts)) > number, 120)
        assert there, "a rank did not answer"
        found = [own[number] for own in self.posts]
        failed = [str(rank) for rank, given in enumerate(found) if given is None]
        if failed:
            raise RankError(f"Process {', '.join(failed)} has failed.")
        assert len({(x.shape, x.dtype) for x in found}) == 1
        return found

    def fail(self):
        self._post(None)

    def _post(self, given):
        with self.changed:
            self.posts[self.rank].append(given)
            self.changed.notify_all()
            return len(self.posts[self.rank]) - 1


def connected(ranks):
    """The `HeadShard` of each thread."""
    posts, changed = [[] for _ in range(ranks)], Condition()
    exchanges = (_ThreadExchange(posts, changed, rank) for rank in range(ranks))
    return [HeadShard(rank, ranks, exchange) for rank, exchange in enumerate(exchanges)]


def part_of(prefill, shard, observed):
    """The capture of one process, which has observed `observed`."""
    names = ("keys", "values", "queries")
    own = {x: tuple(shard.own_heads(y, 0) for y in getattr(prefill, x)) for x in names}
    return dataclasses.replace(prefill, shard=shard, observed=observed, **own)


def in_threads(ranks, run):
    """Results of `run(shard)` in each simulated process, in rank order."""

    def one(shard):
        try:
            return run(shard)
        except BaseException:
            shard.exchange.fail()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, connected(ranks)))
