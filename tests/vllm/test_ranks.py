"""Tensor-parallel ranks make a common cut of a document, and either all or none its context."""

import functools

import pytest

import gracekv
from gracekv.distributed import HeadShard
from gracekv.vllm import ContextStore
from gracekv.vllm.compressing import Outcome
from gracekv.vllm.jobs import Jobs
from gracekv.vllm.orders import order_of
from gracekv.vllm.recording import Recording
from support.compressing_engine import tokens_of
from support.recording_worker import LENGTH, Worker, asked
from support.thread_exchange import connected

RANKS, HEADS = 2, 4


@pytest.fixture
def workers(model, tmp_path):
    made = [Worker(model, tmp_path, shard) for shard in connected(RANKS)]
    yield made
    for worker in made:
        worker.compressor.shutdown()


def outcomes(workers, prefill, request, parameters):
    for worker in workers:
        worker.read(prefill, request, parameters)
    return [worker.outcome() for worker in workers]


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "snapkv", "knorm", "h2o"])
@pytest.mark.parametrize("save", [False, True])
def test_two_ranks_keep_what_one_keeps(model, prefill, workers, recipe, save):
    made = outcomes(workers, prefill, "0", asked("book", recipe=recipe, save=save))
    assert [x.reason for x in made] == ["", ""]
    assert made[0].header == made[1].header
    own = [x.store.load("book", made[0].header.digest).layers for x in workers]
    got = set().union(*(tokens_of(x, rank * HEADS // RANKS) for rank, x in enumerate(own)))
    cache = gracekv.Pipeline.named(recipe).run(prefill, gracekv.Budget.ratio(3)).cache
    want = tokens_of(cache.layers)
    assert len(got) == len(want)
    assert len(got & want) >= 0.99 * len(want)
    assert (made[0].header.entries, made[0].header.bytes) == (len(want), cache.kv_bytes)
    root = workers[0].store.root
    assert ContextStore(root).names() == (["book"] if save else [])
    if save:
        assert tokens_of(ContextStore(root).load("book").layers) == got


def fails(kind, workers, monkeypatch):
    """Let the second rank fail at some point; returns the expected reason."""
    if kind == "size":
        workers[1].store.loaded.limit = 100
        return "bytes of memory"
    name = {"begin": "__init__", "read": "add", "after": "prefill"}[kind]
    stock = getattr(Recording, name)

    @functools.wraps(stock)
    def broken(self, *args):
        shard = next(x for x in (*args, getattr(self, "_shard", None)) if isinstance(x, HeadShard))
        if shard.rank == 0:
            return stock(self, *args)
        # Other attention than ours records nothing.
        return None if kind == "read" else 1 / 0

    monkeypatch.setattr(Recording, name, broken)
    return "did not compute all tokens" if kind == "read" else "ZeroDivisionError"


@pytest.mark.parametrize("kind", ["begin", "read", "after", "size"])
def test_what_fails_on_one_rank_fails_on_all_and_the_next_one_goes_on(
    prefill, workers, monkeypatch, kind
):
    reason = fails(kind, workers, monkeypatch)
    first, second = outcomes(workers, prefill, "0", asked("book", save=True))
    assert (first.header, second.header) == (None, None)
    assert reason in second.reason
    assert "Process 1 has failed" in first.reason
    assert [x.store.names() for x in workers] == [[], []]
    monkeypatch.undo()
    workers[1].store.loaded.limit = 2**30
    made = outcomes(workers, prefill, "1", asked("book"))
    assert made[0].header == made[1].header is not None


def test_a_file_that_cannot_be_written_fails_on_all_ranks(prefill, workers):
    (workers[0].store.root / "book").write_text("no folder")
    first, second = outcomes(workers, prefill, "0", asked("book", save=True))
    assert "is not a folder" in first.reason
    assert "Process 0 has failed" in second.reason
    assert outcomes(workers, prefill, "1", asked("other"))[1].header


def test_ranks_that_read_different_requests_say_so(prefill, workers):
    for worker, request in zip(workers, "01", strict=True):
        worker.read(prefill, request, asked("book"))
    assert all("request of process 1" in x.outcome().reason for x in workers)


def test_what_was_begun_again_or_aborted_keeps_ranks_in_step(prefill, workers):
    for worker in workers:
        worker.read(prefill, "0", asked("book"), 0, 40)
        worker.read(prefill, "0", asked("book"), 0, 30)
        assert worker.compressor.begin(None, None) is None
    made = outcomes(workers, prefill, "1", asked("other"))
    assert [x.request for x in made if x.header] == ["1", "1"]


def test_a_name_means_the_old_context_until_all_ranks_have_made_the_new_one(prefill, workers):
    def ended(request, **options):
        for worker in workers:
            worker.read(prefill, request, asked("book", **options))
        made = [worker.ended().header for worker in workers]
        return made[0]

    old = outcomes(workers, prefill, "0", asked("book"))[0].header
    new = ended("1", ratio=2)
    for worker in workers:
        assert worker.compressor.outcome(idle=True) is None
        worker.compressor.begin(None, "1")
        assert worker.store.header("book") == old
        worker.compressor.begin(None, None, {"1"})
        assert worker.store.load("book").header == new
    # If another rank failed, the previous context stays.
    assert ended("2").digest != new.digest
    for worker in workers:
        worker.compressor.begin(None, None)
        worker.compressor.begin(None, None, {"2"})
        assert worker.store.load("book").header == new


@pytest.fixture
def jobs(root):
    made = Jobs(ContextStore(root), RANKS)
    made.add("0", order_of(asked("book")["gracekv"]), asked("book"), LENGTH)
    return made


def listed(jobs):
    return {one["name"]: one for one in jobs.listing({})}


def test_a_context_is_ready_when_all_ranks_have_made_it(jobs, root):
    header = ContextStore(root).header("c0")
    jobs.update([Outcome("0", header, 1.0)], set(), 100)
    assert listed(jobs)["book"]["state"] == "compressing"
    jobs.update([Outcome("0", header, 2.0)], set())
    found = listed(jobs)["book"]
    assert (found["state"], found["entries"], found["seconds"]) == ("ready", header.entries, 2.0)
    assert (jobs.current, jobs.made) == (None, {"0"})


def test_what_one_rank_could_not_make_failed(jobs, root):
    jobs.update([Outcome("0", None, 1.0, "Too large.")], set())
    jobs.update([Outcome("0", ContextStore(root).header("c0"), 1.0)], set())
    assert listed(jobs)["book"]["reason"] == "Too large."
    # The rank that made its part never serves it.
    assert (jobs.made, jobs.current) == (set(), None)


def test_reasons_of_all_ranks_are_told(jobs):
    told = [Outcome("0", None, 1.0, reason) for reason in ("Process 1 has failed.", "Too large.")]
    jobs.update(told, set())
    assert listed(jobs)["book"]["reason"] == "Process 1 has failed. Too large."


def test_what_one_rank_reported_of_an_aborted_document_is_forgotten(jobs):
    jobs.update([Outcome("0", None, 1.0, "Too large.")], set())
    jobs.finished("0", 10)
    jobs.add("1", order_of(asked("other")["gracekv"]), asked("other"), LENGTH)
    jobs.update([Outcome("1", None, 1.0, "Too large.")], set())
    assert jobs.current == "1"


def test_what_one_rank_drops_for_want_of_room_all_let_go(jobs, root):
    header = ContextStore(root).header("c0")
    jobs.update([Outcome("0", header, 1.0)] * RANKS, set())
    jobs.update([], {("book", header.digest)})
    assert "book" not in listed(jobs)
    assert jobs.forgotten == {"book": header.digest}


@pytest.mark.vllm
def test_reports_of_ranks_are_added():
    from gracekv.vllm.scheduling import WorkerReport

    one, other = (WorkerReport([Outcome(x, None, 1.0)], {("a", x)}, {}, 5) for x in "01")
    both = one.aggregate(other)
    assert [x.request for x in both.outcomes] == ["0", "1"]
    assert (both.dropped, both.recorded) == ({("a", "0"), ("a", "1")}, 10)
