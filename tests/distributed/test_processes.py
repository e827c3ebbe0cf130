"""Processes that share a model by transformers' tensor parallelism, against one process."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gracekv
from gracekv.allocate.top_tokens import token_gains
from gracekv.testing.models import tiny_llama
from support import sharded_process
from support.margins import LOGITS, SCORES

RANKS = 4
_STATES = ("keys", "values", "queries")


@pytest.fixture(scope="module")
def model():
    return tiny_llama(heads=8, kv_heads=4, dim=8)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Where the processes found their model, and left what they found."""
    place = tmp_path_factory.mktemp("ranks")
    model.save_pretrained(place / "model")
    prompt = sharded_process.PROMPTS[0]
    gracekv.compress(model, prompt, ratio=sharded_process.RATIO).save(place / "whole.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(RANKS):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(gracekv.__file__).parents[1]), *sys.path]),
        }
        with open(place / f"log-{rank}", "w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, sharded_process.__file__, str(place)],
                    env=os.environ | variables,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        for process in started:
            process.wait(timeout=240)
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = "\n".join((place / f"log-{rank}").read_text()[-3000:] for rank in range(RANKS))
    assert [process.returncode for process in started] == [0] * RANKS, logs
    return place


@pytest.fixture(scope="module")
def found(folder):
    """What each process found."""
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


def whole(model, prompt=None, **options):
    """One process's result, after a check that no other choice lies within rounding."""
    options = {"ratio": sharded_process.RATIO, "keep_run": True} | options
    result = gracekv.compress(model, prompt or sharded_process.PROMPTS[0], **options)
    runs = result.details if isinstance(result.details, tuple) else (result.details,)
    for run in runs:
        if run.forest is not None:
            _assert_stable(model, result)
        elif run.selection is not None:
            _assert_clear(run)
    # Of each step, the best logit leads by more than rounding.
    cache, ids = result.new_cache(), result.inputs["input_ids"]
    told = result.generate_ids(sharded_process.TOKENS)
    if len(ids) == 1:
        every = torch.cat([ids, told.view(1, -1)], dim=1)[:, cache.packed_length : -1]
        with torch.no_grad():
            logits = model(every, past_key_values=cache).logits[0]
        best = logits.double().topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > LOGITS
    return result


def _assert_clear(run):
    """No dropped token has a gain within rounding of a kept one that it competes with."""
    relevance, chosen = run.relevance, run.selection
    gains = (relevance.scores.double() * relevance.sensitivity.double()[..., None]).flatten(0, 1)
    kept = torch.zeros_like(gains, dtype=torch.bool)
    kept[chosen.head_of_entry(), chosen.start.long() - chosen.region[0]] = True
    assert torch.equal(gains[kept], token_gains(relevance.scores, relevance.sensitivity, chosen))
    if kept.sum(1).unique().numel() > 1 + chosen.layers:  # one cut over all heads
        gains, kept = gains.view(1, -1), kept.view(1, -1)
    for gain, stays in zip(gains, kept, strict=True):
        low, high = float(gain[stays].min()), float(gain[~stays].max())
        # Max pooling gives neighbours one score, on every path.
        assert low > high * (1 + SCORES) or low == high


def _assert_stable(model, result):
    """Slots, trees and auction give the same entries when all that was captured is off by 1e-6."""
    rng = torch.Generator().manual_seed(0)
    prefill = gracekv.capture(model, result.prompt, result.pipeline.needs())

    def off(x):
        return x * (1 + 1e-6 * torch.randn(x.shape, generator=rng).clamp(-3, 3))

    for _ in range(2):
        near = dataclasses.replace(
            prefill,
            hidden={layer: off(x) for layer, x in prefill.hidden.items()},
            **{name: tuple(map(off, getattr(prefill, name))) for name in _STATES},
            **{name: off(getattr(prefill, name)) for name in ("surprisal", "projected_norms")},
        )
        again = gracekv.compress(
            model,
            result.prompt,
            ratio=sharded_process.RATIO,
            pipeline=result.pipeline,
            prefill=near,
        )
        assert positions(again) == positions(result)


def positions(result):
    return sharded_process.facts(result)["positions"]


def assert_same(found, result, ranks):
    """Entries, answers and numbers of all processes are those of one that holds all heads."""
    want = sharded_process.facts(result)
    for rank, mine in enumerate(found):
        own = rank % ranks
        for layers, expected in zip(mine["positions"], want["positions"], strict=True):
            for heads, all_heads in zip(layers, expected, strict=True):
                share = len(all_heads) // ranks
                assert heads == all_heads[own * share : (own + 1) * share]
        for name in ("ids", "entries", "numbers", "widths"):
            assert mine[name] == want[name], name


@pytest.mark.parametrize("name", sharded_process.RECIPES)
def test_four_processes(name, model, found):
    assert_same([x[f"four {name}"] for x in found], whole(model, pipeline=name), 4)


@pytest.mark.parametrize("name", sharded_process.RECIPES[:2])
def test_two_processes(name, model, found):
    assert_same([x[f"two {name}"] for x in found], whole(model, pipeline=name), 2)


def test_a_batch_saved_by_four_and_loaded_by_one(model, found, folder):
    batch = whole(model, sharded_process.PROMPTS)
    assert_same([x["four batch"] for x in found], batch, 4)
    loaded = gracekv.load(folder / "batch.safetensors", model)
    assert_same([sharded_process.facts(loaded)], batch, 1)
    for mine, other in zip(loaded.packed.layers, batch.packed.layers, strict=True):
        for part, tensor in mine.tensors().items():
            torch.testing.assert_close(tensor, other.tensors()[part], atol=1e-4, rtol=1e-4)


def test_saved_by_one_and_loaded_by_four_and_by_two(model, found):
    result = whole(model)
    assert_same([x["four loaded"] for x in found], result, 4)
    assert_same([x["two loaded"] for x in found], result, 2)


def test_a_budget_that_keeps_everything(model, found):
    assert_same([x["four full"] for x in found], whole(model, ratio=1), 4)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("refused lagrangian", "ConfigError: .*'lagrangian'"),
        ("refused d2o", "ConfigError: .*'density'.*'d2o'"),
        ("refused extend", "UnsupportedModelError: extend needs all"),
        ("refused report", "UnsupportedModelError: report needs all"),
        ("refused export", "UnsupportedModelError: export needs all"),
        ("other budget", "RankError: .*budget of process 3 is not that of process 0"),
        ("other prompt", "RankError: .*prompt of process 3 is not that of process 0"),
        ("mixed layers", "UnsupportedModelError: .*of several kinds .full_attention, sliding_"),
        ("gathered", "UnsupportedModelError: .*q_proj is sharded as 'colwise_gather_output'"),
        ("other sharding", "UnsupportedModelError: .*not by transformers' tensor parallelism"),
        ("too late", r"RankError: .*not answer within 1\.5 seconds"),
        ("ended", "RankError: .*has ended"),
    ],
)
def test_what_every_process_is_told(case, text, found):
    told = [x[case] for x in found if case in x]
    assert len(told) >= RANKS - 1
    for rank, (message, seconds) in enumerate(told):
        assert re.match(text, message), (rank, message)
        assert seconds < 30


@pytest.mark.parametrize(
    ("case", "culprit", "text"),
    [
        ("too small", 1, "BudgetError"),
        ("no folder", 0, "FileNotFoundError|OSError|NotADirectoryError|PermissionError"),
        ("fails in a stage", 2, "NonFiniteError: broken on purpose"),
    ],
)
def test_a_failure_of_one_is_an_error_of_all(case, culprit, text, found):
    for rank, process in enumerate(found):
        message, seconds = process[case]
        other = f"RankError: Process {culprit} of the 4 that share this model has failed"
        assert re.match(text if rank == culprit else other, message), (rank, message)
        assert seconds < 30


def test_the_next_call_works_again(found):
    for process in found:
        assert process["after failures"] == process["four gracekv-plus"]
