"""A worker's recording of a prompt equals a capture with transformers."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import gracekv
from gracekv.errors import StoreError, UnsupportedModelError
from gracekv.hf import capture
from gracekv.pipeline import Pipeline
from gracekv.value.block_replay import BlockReplaySums
from gracekv.vllm.orders import order_of
from gracekv.vllm.recording import Recording
from gracekv.vllm.served_model import ServedModel
from support.compressing_engine import tokens_of
from support.prompts import random_prompt
from support.recording_worker import engine

MODEL = {"kv_heads": 2}


@pytest.fixture(scope="module")
def served(model):
    return ServedModel.of(engine(model))


def prompt(start):
    return random_prompt(90, (start, 89), 89, seed=90)


def recorded(served, prefill, order, pieces, begin=0, pool=None):
    """A recording of a prefill with all queries, fed as by an engine."""
    made = Recording(order, prefill.spans.length, served, torch.device("cpu"), pool)
    for start, end in itertools.pairwise([begin, *pieces, prefill.spans.length]):
        for layer in range(prefill.layers):
            states = prefill.queries[layer], prefill.keys[layer], prefill.values[layer]
            parts = [x[:, start:end].transpose(0, 1).clone() for x in states]
            made.add(layer, start, *parts, prefill.scale)
            for part in parts:
                part.fill_(torch.nan)  # as engines reuse their memory
    return made


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "expected-attention", "snapkv", "h2o"])
@pytest.mark.parametrize("pieces", [[], [7, 8, 61]])
def test_a_recording_compresses_as_a_capture(model, served, recipe, pieces):
    pipeline = Pipeline.named(recipe)
    everything = gracekv.prefill.Needs(later_queries=True)
    prefill = capture.capture(model, prompt(5), pipeline.needs() | everything)
    order = order_of({"compress": {"name": "book", "ratio": 3, "recipe": recipe}}, {"start": 5})
    found = recorded(served, prefill, order, pieces).prefill()
    assert found.spans == prefill.spans
    assert torch.equal(found.rope.cos[:90], prefill.rope.cos[:90])
    runs = [pipeline.run(x, order.budget) for x in (found, prefill)]
    mine, theirs = (tokens_of(run.cache.layers) for run in runs)
    assert len(mine) == len(theirs)
    assert len(mine & theirs) >= 0.99 * len(theirs)


@pytest.fixture
def behind():
    """A pool whose observers start when `let_go` is called."""
    pool, gate = ThreadPoolExecutor(1), threading.Event()
    pool.submit(gate.wait)
    yield SimpleNamespace(submit=pool.submit, let_go=gate.set)
    gate.set()
    pool.shutdown()


@pytest.fixture
def shown(model):
    order = order_of({"compress": {"name": "book", "ratio": 3}})
    return capture.capture(model, prompt(0), gracekv.prefill.Needs(later_queries=True)), order


def test_sizes_are_told_while_a_thread_empties_the_recording(served, shown):
    made = recorded(served, *shown, [])
    held = made._record.keys
    emptying = type("Emptying", (), {"nbytes": property(lambda _: held.clear() or 1)})()
    held |= dict.fromkeys(held, emptying)
    assert made.bytes > 0


def test_a_document_that_does_not_fit_or_fails_holds_nothing(served, shown):
    made = recorded(served, *shown, [])
    with pytest.raises(StoreError, match="besides vLLM's; 99 are free"):
        made.check_free(99, 0)
    with pytest.raises(StoreError, match="besides vLLM's; 0 are free"):
        made.check_free(made.bytes, 10**6)
    made.check_free(made.bytes, 0)
    made.fail(ValueError("no more"))
    made.add(0, 0, *(x[0].transpose(0, 1) for x in (shown[0].queries, *2 * [shown[0].keys])), 1.0)
    assert made.bytes == 0
    with pytest.raises(ValueError, match="no more"):
        made.prefill()


def test_observers_that_look_later_see_the_same(served, behind, shown):
    (sums,) = recorded(served, *shown, [40]).prefill().observed.values()
    made = recorded(served, *shown, [], pool=behind)
    behind.let_go()
    (later,) = made.prefill().observed.values()
    torch.testing.assert_close(later, sums)


def test_observers_are_one_run_of_each_layer_behind_at_most(served, behind, shown):
    sent, waits = [], []

    def submit(*work):
        sent.append(behind.submit(*work))
        wait = sent[-1].result
        sent[-1].result = lambda: waits.append(len(sent)) or behind.let_go() or wait()
        return sent[-1]

    made = recorded(served, *shown, [20, 40], pool=SimpleNamespace(submit=submit))
    layers = shown[0].layers
    assert waits == list(range(layers + 1, 3 * layers + 1))
    (later,) = made.prefill().observed.values()
    assert later.isfinite().all()


def test_what_an_observer_raises_later_is_raised(served, behind, shown, monkeypatch):
    monkeypatch.setattr(BlockReplaySums, "add_block", lambda *_, **__: 1 / 0)
    made = recorded(served, *shown, [], pool=behind)
    behind.let_go()
    with pytest.raises(ZeroDivisionError):
        made.prefill()


def test_observers_do_not_look_at_what_was_dropped(served, behind, shown, monkeypatch):
    seen = []
    monkeypatch.setattr(BlockReplaySums, "add_block", lambda *_, **__: seen.append(1))
    recorded(served, *shown, [], pool=behind).cancel()
    behind.let_go()
    assert behind.submit(len, seen).result() == 0


def test_tokens_that_do_not_follow_are_not_written(served, shown):
    made = recorded(served, *shown, [], begin=10)
    with pytest.raises(StoreError, match="did not compute all tokens"):
        made.prefill()


def test_models_and_engines_that_cannot_be_compressed_for_are_refused(model):
    for sizes in ((2, 1), (4, 2), (4, 4)):
        parallel = dict(zip(("world_size_across_dp", "tensor_parallel_size"), sizes, strict=True))
        with pytest.raises(UnsupportedModelError, match=f"2 KV heads in {sizes[0]} processes"):
            ServedModel.of(engine(model, **parallel))
    with pytest.raises(UnsupportedModelError, match="behind 2 API servers"):
        ServedModel.of(engine(model, _api_process_count=2))
    parallel = {"world_size_across_dp": 2, "tensor_parallel_size": 2}
    assert ServedModel.of(engine(model, **parallel)).ranks == 2
    config = type(model.config)(**{**model.config.to_dict(), "model_type": "llama"})
    config.model_type = "unheard"
    with pytest.raises(UnsupportedModelError, match="family 'unheard'"):
        ServedModel.of(engine(SimpleNamespace(config=config, dtype=model.dtype)))
