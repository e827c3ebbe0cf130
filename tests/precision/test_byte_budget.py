"""Byte budgets: never exceeded, spent up to less than an entry, equal to the stored bytes."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings

from gracekv.allocate import Budget
from gracekv.cache import WidthShare
from gracekv.cache.quantised import QuantisedEntries
from gracekv.errors import BudgetError
from gracekv.pipeline import Pipeline
from gracekv.precision import PRECISIONS, AllocatedPrecision, UniformPrecision
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_run
from support.draws import DTYPES, floats, ints, some
from support.stored_bytes import entry_bytes

CODINGS = {
    "8 bits": UniformPrecision(group=8),
    "4 bits": UniformPrecision(bits=4, group=4, sinks=0),
    "allocated": AllocatedPrecision(group=8),
    "allocated without sinks": AllocatedPrecision(group=4, sinks=0),
    "many sinks": UniformPrecision(group=16, sinks=9),
}
PLAIN = Pipeline.named("gracekv-plus")
UNIFORM = dataclasses.replace(PLAIN, precision=PRECISIONS.build("uniform"))


def context_bytes(run, prefill):
    """Bytes counted from the tensors: all keys and values, except those outside the context."""
    stored, spans = sum(map(entry_bytes, run.cache.layers)), prefill.spans
    beside = spans.context_start + max(0, spans.length - 1 - spans.context_end)
    return stored - prefill.layers * prefill.kv_heads * beside * prefill.entry_bytes


@settings(max_examples=40)
@given(
    seed=ints(0, 10_000), recipe=some(["gracekv-plus", "snapkv", "gracekv", "ada-snapkv"]),
    coding=some(sorted(CODINGS)), context=ints(5, 150), prefix=some([0, 2, 4]),
    question=some([0, 5]), dtype=DTYPES, ratio=floats(1, 30), kind=some(["ratio", "bytes"]),
)  # fmt: skip
@example(0, "gracekv-plus", "4 bits", 33, 0, 0, torch.float32, 1.1, "ratio")
def test_the_budget_is_spent_and_never_exceeded(
    seed, recipe, coding, context, prefix, question, dtype, ratio, kind
):
    shape = {"context": context, "prefix": prefix, "question": question, "tail": question}
    prefill = synthetic_prefill(**shape, seed=seed, dtype=dtype, dim=8)
    pipeline = dataclasses.replace(Pipeline.named(recipe), precision=CODINGS[coding])
    units, full = 4, 4 * context * 32
    budget = Budget.ratio(ratio) if kind == "ratio" else Budget.kv_bytes(int(full / ratio))
    try:
        run = pipeline.run(prefill, budget)
    except BudgetError:
        assert ratio > context / 40
        return
    check_run(run, prefill)
    kept = run.accounting
    spent = context_bytes(run, prefill)
    # A quotient may be rounded down: 4224 / 1.1 is a little less than 3840.
    allowed = full / ratio * (1 + 1e-12) if kind == "ratio" else int(full / ratio)
    assert spent == kept.spent_bytes <= kept.budget_bytes <= allowed
    assert kept.full_bytes == units * (prefill.spans.length - 1) * 32
    if kept.spent != units * context and recipe in ("gracekv-plus", "gracekv") and question:
        costs = CODINGS[coding].entry_bytes(8, dtype.itemsize, prefill.spans)
        # An entry that starts a block, or one of the sinks, or a node's two children.
        dearest = max(costs.coded + costs.block, costs.exact)
        assert kept.budget_bytes - spent < dearest * (2 if recipe == "gracekv" else 1)


def test_entries_per_head_count_entries():
    prefill = synthetic_prefill(context=100, dim=32)
    one, two = (x.run(prefill, Budget.entries_per_head(20)) for x in (PLAIN, UNIFORM))
    assert two.accounting.budget_bytes is None
    assert two.accounting.spent == one.accounting.spent == 80
    for layer, other in zip(one.cache.layers, two.cache.layers, strict=True):
        assert torch.equal(layer.positions.long(), other.index()[1])


@pytest.mark.parametrize(("ratio", "bits"), [(1, 16), (1.5, 8), (1.7, 8)])
def test_what_fits_as_it_is_stays_and_what_fits_quantised_is_not_dropped(ratio, bits):
    prefill = synthetic_prefill(context=100, dim=32, dtype=torch.bfloat16)
    run = UNIFORM.run(prefill, Budget.ratio(ratio))
    assert all(isinstance(layer, QuantisedEntries) for layer in run.cache.layers)
    assert run.accounting.spent == 400
    assert min(share.bits for share in run.accounting.widths) == bits


@pytest.mark.parametrize("recipe", ["gracekv-plus-allocated", "snapkv-4bit", "rdkv"])
@pytest.mark.parametrize("context", [1, 2, 3, 33, 34, 100])
def test_at_ratio_1_contexts_are_whole_even_where_codes_cost_more(recipe, context):
    prefill = synthetic_prefill(context=context, prefix=5, dim=64, dtype=torch.bfloat16)
    made = Pipeline.named(recipe).run(prefill, Budget.ratio(1)).accounting
    assert (made.spent, [x.bits for x in made.widths if x.entries]) == (4 * context, [16])


def test_widths_add_up_over_prompts():
    shares = (WidthShare(8, 10, 100), WidthShare(16, 2, 64), WidthShare(8, 1, 9))
    assert WidthShare.summed(shares) == (WidthShare(16, 2, 64), WidthShare(8, 11, 109))


def test_tiny_budgets_are_refused_with_what_works():
    prefill = synthetic_prefill(context=60, dim=8, dtype=torch.bfloat16)
    with pytest.raises(BudgetError, match="is below the smallest that works here, 512") as caught:
        UNIFORM.run(prefill, Budget.kv_bytes(511))
    assert "ratio of at most 15, or kv_bytes of at least 512" in str(caught.value)
    assert UNIFORM.run(prefill, Budget.kv_bytes(512)).accounting.spent == 16
    UNIFORM.run(prefill, Budget.ratio(15))
    short = synthetic_prefill(context=1, dim=8, dtype=torch.float32)
    with pytest.raises(BudgetError, match="Use kv_bytes of at least"):
        UNIFORM.run(short, Budget.kv_bytes(8))


def test_queries_that_are_computed_again_leave_those_of_the_prompts_end():
    prefill = synthetic_prefill(layers=2, context=200, question=0, tail=1, dim=8, seed=4)
    pipeline, budget = Pipeline.named("gracekv-agnostic-allocated"), Budget.ratio(4)
    full = prefill.with_observations(pipeline.needs().observers)
    held = torch.arange(169, 201)

    def source(view, at, layers):
        return [x[:, at] for x in prefill.queries]

    # As after a capture for another recent window: the fit's own queries are missing.
    kept = {"queries": tuple(source(None, held, None)), "query_positions": held}
    other = dataclasses.replace(full, **kept, query_source=source)
    got, want = (pipeline.run(x, budget).cache.layers for x in (other, full))
    assert [x.kv_bytes for x in got] == [x.kv_bytes for x in want]
