"""Four processes that share models by transformers' tensor parallelism, against one process."""

import re

import pytest
import torch

import gracekv
from gracekv.vllm import export
from support import sharded_books, sharded_process
from support.sharded_books import RATIO, facts
from support.sharded_results import assert_same, whole

pytestmark = pytest.mark.long
RANKS = 4


@pytest.fixture(scope="module")
def folder(folder, model):
    """The folder, with further files for four processes."""
    sharded_books.save_models(folder)
    prompt = sharded_process.PROMPTS[0]
    gracekv.compress(model, prompt, ratio=RATIO).save(folder / "whole.safetensors")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """The findings of each process."""
    return sharded_process.findings(folder, RANKS)


@pytest.fixture(scope="module")
def bits(folder):
    """One process's results for quantised entries."""
    prompt = sharded_process.PROMPTS[0]
    return sharded_books.steady(lambda x: sharded_books.bits_facts(x, prompt), folder, "model")


@pytest.mark.parametrize("name", sharded_process.RECIPES)
def test_four_processes(name, model, found):
    assert_same([x[f"four {name}"] for x in found], facts(whole(model, pipeline=name)), 4)


@pytest.mark.parametrize("name", sharded_process.RECIPES[:2])
def test_two_processes(name, model, found):
    assert_same([x[f"two {name}"] for x in found], facts(whole(model, pipeline=name)), 2)


def test_a_batch_saved_by_four_and_loaded_by_one(model, found, folder, tmp_path):
    batch = whole(model, sharded_process.PROMPTS)
    assert_same([x["four batch"] for x in found], facts(batch), 4)
    loaded = gracekv.load(folder / "batch.safetensors", model)
    assert_same([facts(loaded)], facts(batch), 1)
    for mine, other in zip(loaded.packed.layers, batch.packed.layers, strict=True):
        torch.testing.assert_close(mine.tensors(), other.tensors(), atol=1e-4, rtol=1e-4)
    # Refused while the model is shared.
    assert len(loaded.report(tmp_path / "page.html")) == 2
    assert len(export(loaded, tmp_path / "store/book")) == 2


def test_saved_by_one_and_loaded_by_four_and_by_two(model, found):
    result = facts(whole(model))
    assert_same([x["four loaded"] for x in found], result, 4)
    assert_same([x["two loaded"] for x in found], result, 2)


@pytest.mark.parametrize("name", [*sharded_books.BITS, "extended", "extended trees"])
def test_entries_of_fewer_bits_and_passages(name, bits, found):
    assert_same([x[f"bits {name}"] for x in found], bits[name], 4)


def test_quantised_entries_saved_by_four_and_loaded_by_one_two_and_four(model, found, folder):
    recipe = "gracekv-plus-allocated"
    batch = gracekv.compress(model, sharded_process.PROMPTS, ratio=RATIO, pipeline=recipe)
    loaded = gracekv.load(folder / "quantised.safetensors", model)
    want = facts(batch)
    assert {share[0] for share in want["widths"]} == {32, 8, 4}
    assert_same([facts(loaded)], want, 1)
    assert_same([x["two quantised"] for x in found], want, 2)
    for name in ("four quantised", "four quantised again"):
        assert_same([x[name] for x in found], want, 4)
    for mine, other in zip(loaded.packed.layers, batch.packed.layers, strict=True):
        for g in range(mine.heads):
            for one, two in zip(mine.head(g, 1)[:2], other.head(g, 1)[:2], strict=True):
                # A number halfway between two codes may be read as either.
                assert float(((one - two).abs() > 1e-3).float().mean()) < 0.01


@pytest.mark.parametrize("name", sharded_books.MIXED)
def test_other_layers_beside_full_ones(name, found, folder, tmp_path):
    """Full layers are compressed; of others, processes keep their heads or whole linear states."""
    path = tmp_path / "book"
    want = sharded_books.steady(lambda x: sharded_books.book_facts(x, path), folder, name)
    kind = "linear_attention" if name == "qwen3_next" else "sliding_attention"
    assert want["compressed"]["kept"][kind] > 0
    for case in ("compressed", "loaded", "extended"):
        assert_same([x[f"book {name}"][case] for x in found], want[case], 4)
    for case in ("asked", "chat"):
        assert [x[f"book {name}"][case] for x in found] == [want[case]] * RANKS
    # The file that four processes wrote holds all heads.
    loaded = gracekv.load(folder / f"{name}.safetensors", sharded_books.load_model(folder, name))
    assert_same([facts(loaded)], want["compressed"], 1)
    loaded.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_budget_that_keeps_everything(model, found):
    assert_same([x["four full"] for x in found], facts(whole(model, ratio=1)), 4)


@pytest.mark.parametrize(("case", "text"), [
    ("refused lagrangian", "ConfigError: .*'lagrangian'"),
    ("refused d2o", "ConfigError: .*'density'.*'d2o'"),
    ("other answer", "RankError: .*max_new_tokens of process 3 is not that of process 0"),
    ("other passage", "RankError: .*prompt of process 3 is not that of process 0"),
    ("refused report", "UnsupportedModelError: report needs all"),
    ("refused comparison", "UnsupportedModelError: report needs all"),
    ("refused export", "UnsupportedModelError: export needs all"),
    ("other budget", "RankError: .*budget of process 3 is not that of process 0"),
    ("other capture", "RankError: .*prompt of process 3 is not that of process 0"),
    ("other prompt", "RankError: .*prompt of process 3 is not that of process 0"),
    ("no attention", "UnsupportedModelError: .*layer 1 has no attention heads"),
    ("gathered", "UnsupportedModelError: .*q_proj is sharded as 'colwise_gather_output'"),
    ("other sharding", "UnsupportedModelError: .*not by transformers' tensor parallelism"),
    ("too late", r"RankError: .*not answer within 1\.5 seconds"),
    ("ended", "RankError: .*has exited"),
])  # fmt: skip
def test_what_every_process_is_told(case, text, found):
    told = [x[case] for x in found if case in x]
    assert len(told) >= RANKS - 1
    for rank, (message, seconds) in enumerate(told):
        assert re.match(text, message), (rank, message)
        assert seconds < 30


@pytest.mark.parametrize(("case", "culprit", "text"), [
    ("too small", 1, "BudgetError"),
    ("no folder", 0, "OutputError"),
    ("fails in a stage", 2, "NonFiniteError: broken on purpose"),
])  # fmt: skip
def test_a_failure_of_one_is_an_error_of_all(case, culprit, text, found):
    for rank, process in enumerate(found):
        message, seconds = process[case]
        other = f"RankError: Process {culprit} of the 4 that share this model has failed"
        assert re.match(text if rank == culprit else other, message), (rank, message)
        assert seconds < 30


def test_the_next_call_works_again(found):
    for process in found:
        assert process["after failures"] == process["four gracekv-plus"]
