"""Threads that compress and generate at the same time with one model."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import gracekv
from gracekv.hf import detach
from gracekv.testing.models import tiny_llama
from support.covering import cases
from support.margins import assert_same_tokens, logits_over
from support.prompts import IDS

# The answers differ in length, and so do the threads' tails.
COUNTS = (14, 9)
LOOPS = cases(2, 40)


def prompt_of(ids):
    return gracekv.Prompt.from_ids(ids, (4, len(ids) - 12), question_end=len(ids) - 4)


def result_of(model, ids=IDS, **options):
    return gracekv.compress(model, prompt_of(ids), **({"ratio": 3} | options))


def at_once(*works):
    """The functions' results, each called in its own thread; all start at the same time."""
    barrier = Barrier(len(works))

    def started(work):
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(started, work) for work in works]]


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_two_threads_generate_from_one_result(model, backend):
    alone = [result_of(model, backend=backend).generate_ids(count) for count in COUNTS]
    for _ in range(LOOPS):
        # A fresh result, so both threads run the backend's first-call setup.
        result = result_of(model, backend=backend)
        together = at_once(*(lambda n=count: result.generate_ids(n) for count in COUNTS))  # noqa: B023
        for got, want in zip(together, alone, strict=True):
            assert_same_tokens(got, want, logits_over(result))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_two_results_of_one_model_generate_at_once(model, backend):
    results = [
        result_of(model, ids, backend=backend, ratio=ratio)
        for ids, ratio in ((IDS, 3), (IDS.flip(0)[:120], 5))
    ]
    alone = [result.generate_ids(10) for result in results]
    for _ in range(LOOPS):
        # Also where the first call attaches the model again.
        detach(model)
        together = at_once(*(lambda r=result: r.generate_ids(10) for result in results))
        for got, want, result in zip(together, alone, results, strict=True):
            assert_same_tokens(got, want, logits_over(result))


def test_a_model_is_compressed_while_it_generates_in_other_threads(model):
    ids, plain = IDS[None], gracekv.capture(model, prompt_of(IDS))

    def compressed():
        return result_of(model, IDS.flip(0), capture=gracekv.CaptureOptions(chunk=16))

    result, other = result_of(model), compressed()
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False), result.generate_ids(12)
    for _ in range(LOOPS):
        made, read, *answers = at_once(
            compressed,
            lambda: gracekv.capture(model, prompt_of(IDS)),
            lambda: model.generate(ids, max_new_tokens=12, do_sample=False),
            lambda: result.generate_ids(12),
        )
        for got, want in zip(made.packed.layers, other.packed.layers, strict=True):
            assert torch.equal(got.positions, want.positions)
        assert all(map(torch.equal, read.keys, plain.keys))
        assert all(map(torch.equal, answers, wanted))


def test_the_last_of_several_blocks_detaches_the_model():
    model, first, second = tiny_llama(), Barrier(2), Barrier(2)
    prompt = prompt_of(IDS)

    def early():
        with gracekv.attached(model):
            first.wait()
        second.wait()

    def late():
        with gracekv.attached(model):
            first.wait()
            second.wait()
            return gracekv.compress(model, prompt, ratio=3).generate_ids(3)

    assert at_once(early, late)[1].shape == (1, 3)
    assert model.config._attn_implementation == "sdpa"
