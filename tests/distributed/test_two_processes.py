"""Two processes that share a model, against one process: the daily part of `test_processes`."""

import re

import pytest
import torch

import gracekv
from gracekv.value.output_projection import OutputProjection
from support import sharded_process
from support.sharded_books import facts
from support.sharded_results import assert_same, whole


@pytest.fixture(scope="module")
def found(folder):
    return sharded_process.findings(folder, 2)


@pytest.mark.parametrize("name", sharded_process.RECIPES[:2])
def test_each_keeps_its_heads_of_what_one_process_keeps(name, model, found):
    assert_same([x[name] for x in found], facts(whole(model, pipeline=name)), 2)


def test_sensitivities_are_those_of_a_sharded_layer_with_its_adapter(model, found):
    want = torch.tensor(sharded_process.adapted_sensitivity(model))
    plain = OutputProjection()(gracekv.capture(model, sharded_process.PROMPTS[0]))
    assert (want - plain).abs().max() > 0.1
    got = torch.cat([torch.tensor(x["adapted"]) for x in found], dim=1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_saved_by_two_and_loaded_by_one_and_by_two(model, found, folder):
    result = facts(whole(model))
    assert_same([x["loaded"] for x in found], result, 2)
    assert_same([facts(gracekv.load(folder / "shared.safetensors", model))], result, 1)


def test_what_differs_or_fails_in_one_is_an_error_of_both_and_the_next_call_works(found):
    other = "RankError: .*budget of process 1 is not that of process 0"
    failed = "RankError: Process 1 of the 2 that share this model has failed"
    for case, texts in (("other budget", (other, other)), ("too small", (failed, "BudgetError"))):
        for process, text in zip(found, texts, strict=True):
            assert re.match(text, process[case][0]), process[case]
    for process in found:
        assert process["after failures"] == process["loaded"]
    assert re.match("RankError: .*has exited", found[0]["ended"][0])
