"""The connector, without an engine."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gracekv.errors import StoreError

pytestmark = pytest.mark.vllm


def test_a_worker_tells_which_contexts_it_cannot_open():
    from gracekv.vllm.connector import GraceConnector, StepContexts
    from gracekv.vllm.context_attention import current_step

    def load(name, digest):
        if name in ("gone", "damaged"):
            cause = FileNotFoundError() if name == "gone" else None
            raise StoreError(f"Context {name!r} cannot be read.") from cause
        return SimpleNamespace(header=SimpleNamespace(digest=digest))

    connector = object.__new__(GraceConnector)
    used = []
    connector._store = SimpleNamespace(load=load, retain=used.append, dropped=set)
    connector._compressor = SimpleNamespace(
        begin=lambda chunk, current, made: None, outcome=lambda idle: None, recorded=0
    )
    opening = {"0": "gone", "1": "book", "3": "damaged"}
    step = StepContexts({9: ("book", "1", 3)}, opening, used={"0", "1", "2"})
    connector.bind_connector_metadata(step)
    assert used == [{"0", "1", "2"}]
    assert [(block, one.tokens) for block, one in current_step().asking.items()] == [(9, 3)]
    told = connector.build_connector_worker_meta().opened
    assert (told["0"]["status"], told["1"], told["3"]["status"]) == (404, None, 400)
    assert "Context 'gone' cannot be read" in told["0"]["reason"]
    # One rank's success does not hide another's failure to open it.
    other = type(connector.build_connector_worker_meta())([], set(), dict.fromkeys("013"))
    assert connector.build_connector_worker_meta().aggregate(other).opened == told
    connector.clear_connector_metadata()
    assert current_step() is None


class Scheduler:
    """The connector's part of a scheduler, called as by an engine, step by step."""

    def __init__(self, admit):
        from gracekv.vllm.scheduling import SchedulerSide

        self.side = SchedulerSide()
        self.side.begin(SimpleNamespace(admit=admit, header=admit, names=list))

    def take(self, key, name, skips=False):
        facts = {"request_id": key, "kv_transfer_params": {"gracekv": name}, "cache_salt": None}
        tokens = {"max_tokens": 9, "num_prompt_tokens": 3, "num_computed_tokens": 0}
        hashed = {"skip_reading_prefix_cache": skips, "update_block_hashes": list}
        request = SimpleNamespace(**facts, **tokens, **hashed)
        self.side.on_new_request(request)
        return request

    def abort(self, name):
        params = {"kv_transfer_params": {"gracekv": name}, "abort_immediately": True}
        self.side.on_new_request(SimpleNamespace(request_id="9", **params))

    def step(self, *requests, opened=()):
        """The message to workers before a step with tokens of the requests that may begin."""
        begun = [x for x in requests if self.side.get_num_new_matched_tokens(x, 0) == (0, False)]
        step = SimpleNamespace(
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda key: [[0, int(key)]]),
            num_scheduled_tokens={x.request_id: 3 for x in begun},
            total_num_scheduled_tokens=3 * len(begun),
        )
        told = self.side.build_connector_meta(step)
        from gracekv.vllm.scheduling import WorkerReport

        report = WorkerReport([], set(), dict(opened))
        self.side.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        return told

    def reply(self, request):
        return self.side.request_finished(request, [])[1]


def header(name):
    return SimpleNamespace(digest=f"digest of {name}", continuation=None)


def admit(transfer):
    return header(transfer["gracekv"])


def test_a_request_begins_when_its_context_is_in_memory():
    scheduler = Scheduler(admit)
    first, again = scheduler.take("1", "book"), scheduler.take("2", "book", skips=True)
    digest = "digest of book"
    for opened in ({}, {digest: None}):
        told = scheduler.step(first, again, opened=opened)
        assert (told.named, told.opening, told.used) == ({}, {digest: "book"}, {digest})
        assert not told.idle
    told = scheduler.step(first, again)
    assert (set(told.named), told.opening) == ({1, 2}, {})
    # A request that skips cached pages must not find any: it gets its own salt at first.
    assert (first.cache_salt, again.cache_salt) == (f"gracekv:{digest}:", f"gracekv:{digest}::2")
    assert (first.skip_reading_prefix_cache, again.skip_reading_prefix_cache) == (False, True)
    for request in (first, again):
        assert scheduler.reply(request) is None
    # It is not in use now, so workers may have dropped it.
    assert scheduler.step().used == set()
    assert scheduler.step(scheduler.take("3", "book")).opening == {digest: "book"}


def test_a_client_s_own_salt_finds_no_pages_of_a_context():
    scheduler = Scheduler(admit)
    salt, hashed = scheduler.take("1", "book").cache_salt, Mock(return_value=[])
    plain = SimpleNamespace(
        request_id="2", kv_transfer_params=None, cache_salt=salt, update_block_hashes=hashed
    )
    scheduler.side.on_new_request(plain)
    assert plain.cache_salt == f":{salt}"
    assert hashed.called


def test_a_context_that_is_lost_before_its_request_begins_is_a_client_s_error():
    scheduler = Scheduler(admit)
    first, other = scheduler.take("1", "book"), scheduler.take("2", "other")
    salt = first.cache_salt
    lost = {"state": "failed", "reason": "There is no context 'book'.", "status": 404}
    scheduler.step(first, other, opened={"digest of book": lost, "digest of other": None})
    # It is read without the context, under its own salt.
    assert set(scheduler.step(first, other).named) == {2}
    told = scheduler.step(first, other)
    assert (set(told.named), told.used) == ({2}, {"digest of other"})
    assert first.max_tokens == 1
    assert first.cache_salt.startswith(salt)
    assert first.cache_salt != salt
    assert scheduler.reply(first) == {"gracekv": lost}


@pytest.mark.parametrize("form", [None, "another"])
def test_a_question_that_waited_reads_the_context_that_replaced_its_own(form):
    book = SimpleNamespace(digest="old", continuation=None)
    scheduler = Scheduler(lambda said: SimpleNamespace(**vars(book)))
    question = scheduler.take("1", "book", skips=True)
    lost = {"state": "failed", "reason": "Context 'book' was replaced.", "status": 400}
    assert scheduler.step(question, opened={"old": lost}).opening == {"old": "book"}
    book.digest, book.continuation = "new", form
    scheduler.step(question)
    if form:  # its prompt was made for the old one's
        assert scheduler.reply(question) == {"gracekv": lost}
        return
    assert question.cache_salt == "gracekv:new::1:1"
    assert scheduler.step(question, opened={"new": None}).opening == {"new": "book"}
    assert set(scheduler.step(question).named) == {1}
    assert scheduler.reply(question) is None


def test_few_contexts_are_opened_at_once():
    scheduler = Scheduler(admit)
    requests = [scheduler.take(str(number), f"c{number}") for number in range(20)]
    scheduler.abort("c0")
    assert scheduler.side._skips.keys() == {str(number) for number in range(20)}
    opening = scheduler.step(*requests).opening
    assert len(opening) == 8
    scheduler.step(*requests, opened=dict.fromkeys(opening))
    assert scheduler.step(*requests).opening.keys().isdisjoint(opening)


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), TypeError("'list'")])
def test_any_error_refuses_that_request_and_the_scheduler_goes_on(error):
    scheduler = Scheduler(Mock(side_effect=error))
    request = scheduler.take("0", ["book"], skips=True)
    assert scheduler.side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert request.cache_salt == "gracekv:0:"
    assert "cannot be used" in scheduler.reply(request)["gracekv"]["reason"]
