"""Ragged contexts and pages of a whole step, interpreted, against loops in float64."""

import pytest
import torch
from hypothesis import given, settings

from gracekv.testing.attention import TOLERANCES
from gracekv.vllm.triton_attention import plan_gpu_batch
from support.covering import LONG
from support.draws import SEEDS, ints, lists, some, tuples
from support.paged_contexts import LAYOUTS, check_step, paged_step

CONTEXTS = {"a": [70, 0], "b": [3, 41], "empty": [0, 0]}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_a_step_of_all_kinds_of_requests(dtype):
    requests = [("a", 33, 1), (None, 20, 20), ("b", 17, 17), ("a", 1, 1), ("empty", 5, 2),
                ("b", 40, 3), (None, 9, 1)]  # fmt: skip
    check_step(paged_step(0, CONTEXTS, requests, group=3, dtype=dtype))


@pytest.mark.parametrize(("dim", "group", "block", "layout", "dtype"), [
    (64, 1, 16, LAYOUTS[0], torch.float32), (80, 7, 32, LAYOUTS[1], torch.bfloat16),
    (128, 4, 48, LAYOUTS[2], torch.float16), (64, 2, 16, LAYOUTS[1], torch.float32),
])  # fmt: skip
def test_shapes_and_layouts(dim, group, block, layout, dtype):
    requests = [("b", 50, 4), ("a", 18, 1), (None, 3, 3)]
    sizes = {"dim": dim, "group": group, "block": block}
    check_step(paged_step(dim, CONTEXTS, requests, **sizes, dtype=dtype, layout=layout))


@settings(max_examples=12 if LONG else 5)
@given(
    seed=SEEDS,
    group=ints(1, 7),
    layout=some(LAYOUTS),
    lengths=lists(ints(0, 90), min_size=4, max_size=4),
    requests=lists(
        tuples(some(["a", "b", None]), ints(0, 60), ints(1, 40)), min_size=1, max_size=5
    ),
)
def test_any_step(seed, lengths, requests, group, layout):
    contexts = {"a": lengths[:2], "b": lengths[2:]}
    # The first request has a context, as otherwise nothing is planned.
    requests = [("a", 2, 1)] + [(name, before + new, new) for name, before, new in requests]
    check_step(paged_step(seed, contexts, requests, group=group, layout=layout))


def test_long_contexts_and_long_answers_are_split():
    step = paged_step(1, {"a": [1500, 20]}, [("a", 700, 1), ("a", 3, 1)], group=2)
    parts = {(int(context), int(parts)) for context, _, _, _, _, parts in plan(step).units}
    assert parts == {(0, 4), (-1, 3)}
    check_step(step)


def test_long_questions_need_no_slots():
    step = paged_step(2, {"a": [30, 5]}, [("a", 90, 90), ("a", 60, 40)], group=4)
    batch = plan(step)
    assert batch.merged == batch.slots == 0
    check_step(step)


def test_requests_of_a_context_share_its_entries():
    requests = [("a", 9, 1), ("b", 9, 1), ("a", 20, 1), ("a", 4, 1)]
    units = plan(paged_step(3, {"a": [30, 5], "b": [9, 9]}, requests, group=4)).units
    assert units[units[:, 0] >= 0][:, 3].tolist() == [12, 4]


def test_a_request_that_is_not_in_the_step_changes_nothing():
    step = paged_step(4, {"a": [30, 5]}, [("a", 9, 1), (None, 20, 3)], group=2)
    step.metadata.block_table[0] = 99
    asking = {5: next(iter(step.asking.values()))}
    batch = plan_gpu_batch(asking, step.metadata, step.group, step.pages)
    assert batch.places.tolist() == batch.positions.tolist() == [-1]


def plan(step):
    return plan_gpu_batch(step.asking, step.metadata, step.group, step.pages)
