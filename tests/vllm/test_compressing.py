"""Contexts made by a worker, and the scheduler's view of them, without an engine."""

import ctypes
import time
from dataclasses import replace

import pytest
import torch

import gracekv
from gracekv.errors import StoreError
from gracekv.vllm import ContextStore, compressing
from gracekv.vllm.compressing import Compressor, Outcome
from gracekv.vllm.jobs import Jobs
from gracekv.vllm.orders import order_of
from gracekv.vllm.recording import Recording
from support.recording_worker import LENGTH, Worker, asked


@pytest.mark.parametrize("save", [False, True])
def test_a_worker_makes_the_context_that_an_export_writes(model, prefill, tmp_path, save):
    (tmp_path / "store").mkdir()
    worker = Worker(model, tmp_path / "store")
    worker.read(prefill, "0", asked("book", save=save, recipe="knorm"))
    made = worker.outcome()
    assert made.reason == ""
    assert made.seconds > 0
    mine = worker.store.load("book", made.header.digest)
    run = gracekv.Pipeline.named("knorm").run(prefill, gracekv.Budget.ratio(3))
    for stored, packed in zip(mine.layers, run.cache.layers, strict=True):
        assert torch.equal(stored.positions, packed.positions)
        assert torch.equal(stored.values, packed.values)
    assert made.header.length == LENGTH - 1
    # Another process sees only saved contexts.
    assert ContextStore(tmp_path / "store").names() == (["book"] if save else [])
    if save:
        assert ContextStore(tmp_path / "store").load("book").header.digest == made.header.digest


def test_a_prompt_that_was_preempted_is_recorded_again(model, prefill, tmp_path):
    worker = Worker(model, tmp_path)
    worker.read(prefill, "0", asked("book"), 0, 40)
    assert worker.read(prefill, "0", asked("book"), 0, 30) is None
    worker.read(prefill, "0", asked("book"), 30, LENGTH)
    assert worker.outcome().header is not None


def test_what_an_aborted_request_left_is_dropped(model, prefill, tmp_path):
    worker = Worker(model, tmp_path)
    worker.read(prefill, "0", asked("book"), 0, 40)
    assert worker.compressor.begin(None, None) is None
    # Its later tokens do not belong to the next one.
    assert worker.read(prefill, "0", asked("book"), 40, LENGTH) is None
    assert worker.compressor.outcome(idle=True) is None
    worker.read(prefill, "1", asked("other"))
    assert worker.outcome().request == "1"


def test_a_failure_is_told_and_the_next_one_goes_on(model, prefill, tmp_path, monkeypatch):
    worker = Worker(model, tmp_path, limit=100)
    worker.read(prefill, "0", asked("book"))
    assert "bytes of memory" in worker.outcome().reason
    worker.store.loaded.limit = 2**30
    cases = [
        (Recording, "__init__", lambda *_: 1 / 0, "cannot be used (ZeroDivisionError)"),
        (Compressor, "_compress", lambda *_: 1 / 0, "cannot be used (ZeroDivisionError)"),
        # Other attention than ours records nothing.
        (Recording, "add", lambda *_: None, "did not compute all tokens"),
    ]
    for number, (owner, name, changed, said) in enumerate(cases):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, changed)
            worker.read(prefill, str(number), asked("book"))
            assert said in worker.outcome().reason
    worker.read(prefill, "3", asked("book"))
    assert worker.outcome().header is not None


def test_a_context_that_cannot_be_held_is_logged_and_the_next_one_is_made(
    model, prefill, tmp_path, monkeypatch, caplog
):
    worker = Worker(model, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ContextStore, "put", lambda *_: 1 / 0)
        worker.read(prefill, "0", asked("book"))
        assert worker.outcome().header is not None
    assert "Context 'book' cannot be held." in caplog.text
    assert worker.store.names() == []
    worker.read(prefill, "1", asked("book"))
    worker.outcome()
    assert worker.store.names() == ["book"]


@pytest.fixture
def headers(root):
    """Contexts that were made but not saved."""
    made = [ContextStore(root).load(f"c{number}") for number in range(3)]
    for context in made:
        header = replace(context.header, digest=f"{len(context.header.digest)}{id(context)}")
        object.__setattr__(context, "header", header)
    return made


def test_the_least_recently_used_of_what_is_in_no_file_goes_for_good(headers, root):
    store = ContextStore(root, limit=int(2.5 * headers[0].bytes))
    for number, context in enumerate(headers[:2]):
        store.put(context.header, f"m{number}", context)
    assert store.names() == ["c0", "c1", "c2", "m0", "m1"]
    store.load("m0")
    store.put(headers[2].header, "m2", headers[2])
    assert store.dropped() == {("m1", headers[1].header.digest)}
    assert store.dropped() == set()
    with pytest.raises(StoreError, match="There is no context 'm1'"):
        store.load("m1")
    # Contexts in use stay.
    store.retain({headers[0].header.digest})
    store.load("c0")
    assert store.load("m0") is headers[0]


def test_a_context_in_memory_comes_before_the_folder_s_until_it_is_forgotten(headers, root):
    store = ContextStore(root)
    old = store.load("c0").header.digest
    store.put(headers[1].header, "c0", headers[1])
    assert store.header("c0") is headers[1].header
    assert not store.forget("c0", "another digest")
    store.retain({headers[1].header.digest})
    assert store.forget("c0")
    assert store.load("c0", headers[1].header.digest) is headers[1]
    assert store.load("c0").header.digest == old
    store.retain(set())
    assert headers[1].header.digest not in store.loaded.digests


@pytest.fixture
def jobs(root):
    return Jobs(ContextStore(root, allow=lambda name, parameters: "hidden" not in name))


def add(jobs, request, parameters, length=10):
    return jobs.add(request, order_of(parameters["gracekv"]), parameters, length)


def listed(jobs, which=True):
    return {one["name"]: one for one in add(jobs, "", {"gracekv": {"list": which}})["contexts"]}


def test_documents_have_their_turn_one_after_the_other(jobs, headers):
    for request, name in enumerate(("a", "b", "hide")):
        add(jobs, str(request), asked(name))
    assert jobs.current == "0"
    assert not jobs.pending
    assert jobs.finished("1", 4)["state"] == "failed"
    assert jobs.finished("0", 10) == {"name": "a", "state": "compressing"}
    assert jobs.pending
    assert jobs.current == "0"
    assert listed(jobs)["a"]["state"] == "compressing"
    # A listing of one name reads no other header.
    for name, found in (("a", ["a"]), ("c0", ["c0"]), ("none", [])):
        assert list(listed(jobs, name)) == found
    jobs.update([], set(), 5000)
    assert listed(jobs)["a"]["recorded_bytes"] == 5000
    assert listed(jobs)["hide"]["recorded_bytes"] == 0
    jobs.update([Outcome("0", headers[0].header, 1.5)], set(), 10)
    assert jobs.current == "2"
    # An idle engine keeps stepping until workers are told to serve it.
    assert jobs.pending
    jobs.made = set()
    assert not jobs.pending
    found = listed(jobs)["a"]
    assert (found["state"], found["seconds"], found["saved"]) == ("ready", 1.5, False)
    assert found["recorded_bytes"] == 5000
    jobs.update([Outcome("2", None, 0.5, "Too long.")], set())
    assert listed(jobs)["hide"]["reason"] == "Too long."
    missing = StoreError("There is none.")
    missing.__cause__ = FileNotFoundError()
    assert "Too long" in jobs.refused(missing, "hide")["reason"]
    jobs.update([], {("a", headers[0].header.digest)})
    assert "a" not in listed(jobs)


def test_a_context_that_is_made_anew_says_so(jobs, headers):
    add(jobs, "0", asked("c0"))
    with pytest.raises(StoreError, match="is being made"):
        add(jobs, "1", {"gracekv": {"delete": "c0"}})
    assert listed(jobs)["c0"]["state"] == "compressing"
    assert listed(jobs)["c0"]["entries"] > 0
    jobs.update([Outcome("0", headers[1].header, 1.0)], set())
    assert listed(jobs)["c0"]["saved"] is False
    add(jobs, "1", asked("c0", save=True))
    jobs.update([Outcome("1", headers[2].header, 1.0)], set())
    assert listed(jobs)["c0"]["saved"] is True


def test_only_so_many_failures_are_remembered(jobs, monkeypatch):
    monkeypatch.setattr("gracekv.vllm.jobs._REMEMBERED", 2)
    for request in ("0", "1", "0", "2"):
        add(jobs, request, asked(f"f{request}"))
        jobs.update([Outcome(request, None, 0.5, "Too long.")], set())
    assert sorted(listed(jobs).keys() - {"c0", "c1", "c2"}) == ["f0", "f2"]


def test_deleted_and_expired_contexts_are_gone(jobs, headers, root):
    add(jobs, "0", asked("brief", expires=0.01))
    jobs.update([Outcome("0", headers[0].header, 1.0)], set())
    time.sleep(0.02)
    with pytest.raises(StoreError, match="no context 'brief'"):
        add(jobs, "1", {"gracekv": {"extend": {"name": "brief", "ratio": 2}}})
    assert "brief" not in listed(jobs)
    assert jobs.forgotten == {"brief": None}
    assert add(jobs, "1", {"gracekv": {"delete": "c0"}}) == {"name": "c0", "state": "deleted"}
    assert sorted(x.name for x in root.iterdir()) == ["c1", "c2"]
    with pytest.raises(StoreError, match="no context 'c0' in the store to delete"):
        add(jobs, "2", {"gracekv": {"delete": "c0"}})
    (root / "c1" / "notes.txt").touch()
    with pytest.raises(StoreError, match="not replaced"):
        add(jobs, "3", {"gracekv": {"delete": "c1"}})
    assert "c1" not in jobs.forgotten


def test_who_may_not_use_a_name_may_not_make_delete_or_see_it(jobs, root, caplog):
    for parameters in (asked("hidden"), *({"gracekv": {x: "hidden"}} for x in ("delete", "list"))):
        with pytest.raises(StoreError, match="may not use the context 'hidden'"):
            add(jobs, "0", parameters)
    (root / "c1").rename(root / "hidden1")
    assert sorted(listed(jobs)) == ["c0", "c2"]
    # An operator's rule that fails refuses, too, and the log says why.
    assert not caplog.text
    jobs = Jobs(ContextStore(root, allow=lambda name, _: 1 / (name != "c0")))
    assert sorted(listed(jobs)) == ["c2", "hidden1"]
    assert "ZeroDivisionError: division by zero" in caplog.text


def test_the_compressing_thread_has_a_quarter_of_the_threads_while_the_model_runs():
    if not hasattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads"):
        pytest.skip("this build of torch has no OpenMP")
    thread, before = compressing._Thread(), torch.get_num_threads()
    assert thread.submit(torch.get_num_threads).result() == max(1, before // 4)
    thread._team = 12
    assert thread.submit(torch.get_num_threads).result() == 3
    thread.is_alone = True
    assert thread.submit(torch.get_num_threads).result() == 12
    assert torch.get_num_threads() == before
    thread.shutdown()
