"""Invariants of every rival, for any prompt."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv import Budget, Pipeline, recipes
from gracekv.errors import BudgetError
from gracekv.fit import NoFit
from gracekv.prefill import Prefill
from gracekv.testing import synthetic_prefill
from support.covering import cases
from support.draws import DTYPES, SEEDS, floats, ints
from support.selections import check_best_tokens, check_selection, kept_positions

# Quantised ones count bytes, and round: see tests/precision.
RIVALS = [
    name
    for name in recipes.names()
    if not name.startswith("gracekv")
    and not Pipeline.named(name).keep_all
    and Pipeline.named(name).precision.name == "full"
]
SELECTIONS = [name for name in RIVALS if Pipeline.named(name).pack.name == "evict"]


PREFILLS = st.builds(
    synthetic_prefill, layers=ints(1, 3), kv_heads=ints(1, 3), group=ints(1, 2), dim=st.just(8),
    prefix=ints(0, 6), context=ints(5, 90), question=ints(0, 8), tail=ints(0, 3), seed=SEEDS,
    dtype=DTYPES,
)  # fmt: skip


def run_of(name: str, prefill: Prefill, ratio: float):
    """The rival's run without its fit, since fitted entries differ from the captured ones."""
    pipeline = dataclasses.replace(Pipeline.named(name), fit=NoFit())
    try:
        return pipeline.run(prefill, Budget.ratio(ratio))
    except BudgetError:
        assert ratio > prefill.spans.context_length / 4 - 1
        return None


def window_of(name: str, prefill: Prefill, run) -> int:
    """Recent tokens that must be kept: GraceKV's window, unless a rule replaces it."""
    plan = run.plan
    least = plan.total // (plan.layers * plan.heads)
    shape = {"layers": plan.layers, "heads": plan.heads, "context": plan.context}
    shared = Budget.entries_per_head(max(4, least)).plan(**shape, entry_bytes=1)
    size = min(shared.recent, Pipeline.named(name).window.size)
    if name == "streaming-llm":  # its sinks come first
        return min(size, max(0, least - max(0, 4 - prefill.spans.context_start)))
    return run.accounting.recent if name == "h2o-half" else size


@pytest.mark.parametrize("name", RIVALS)
@settings(max_examples=cases(10, 25))
@given(prefill=PREFILLS, ratio=floats(1.0, 20.0))
def test_the_budget_is_spent_exactly_and_what_must_stay_stays(name, prefill, ratio):
    run = run_of(name, prefill, ratio)
    if run is None or run.selection is None:  # the budget keeps everything
        return
    check_selection(run, prefill, window_of(name, prefill, run))


@pytest.mark.parametrize("name", SELECTIONS)
@settings(max_examples=cases(6, 15))
@given(prefill=PREFILLS, ratio=floats(1.1, 12.0))
def test_each_head_keeps_its_best_tokens(name, prefill, ratio):
    run = run_of(name, prefill, ratio)
    if run is None or run.selection is None:
        return
    check_best_tokens(run, prefill)
    if name == "h2o-half":
        share = run.plan.total // (run.plan.layers * run.plan.heads)
        assert run.accounting.recent == max(1, share // 2)


EQUAL = (
    "streaming-llm", "h2o", "h2o-half", "snapkv", "chunkkv", "cam", "scissorhands",
    "knorm", "keydiff", "lagkv", "tova", "critical-snapkv", "critical-expected-attention",
    "attention-matching", "attention-matching-omp", "grkv",
)  # fmt: skip


@pytest.mark.parametrize("name", RIVALS)
@settings(max_examples=cases(4, 8))
@given(seed=ints(0, 10_000), total=ints(6 * 8, 6 * 50))
def test_budget_shapes(name, seed, total):
    prefill = synthetic_prefill(layers=3, kv_heads=2, context=70, dim=8, seed=seed)
    run = Pipeline.named(name).run(prefill, Budget.kv_bytes(total * prefill.entry_bytes))
    entries = run.accounting.entries
    share, left = divmod(total, 6)
    equal = torch.tensor([share + (unit < left) for unit in range(6)]).view(3, 2)
    if name in EQUAL:
        assert torch.equal(entries, equal)
    elif name in ("ada-snapkv", "compactor", "defensivekv", "expected-attention"):
        assert torch.equal(entries.sum(1), equal.sum(1))
    elif name == "pyramidkv":
        assert bool((entries.sum(1).diff() <= 0).all())
        assert bool(((entries[:, 0] - entries[:, 1]) <= 1).all())
        if share > 40:
            assert entries[0, 0] > entries[2, 0]
    elif name == "d2o":
        assert bool(((entries[:, 0] - entries[:, 1]) <= 1).all())
    else:  # one budget for all heads
        assert Pipeline.named(name).quota.name == "global"


def test_streaming_llm_puts_sinks_before_the_shared_window():
    prefill = synthetic_prefill(prefix=1, context=60)
    run = Pipeline.named("streaming-llm").run(prefill, Budget.entries_per_head(10))
    # Position 0 is prefix and free; three sinks and seven recent tokens are paid for.
    assert kept_positions(run, prefill, 1, 1).tolist() == [1, 2, 3, *range(54, 61)]


def test_chunkkv_spends_the_rest_on_the_next_chunks_best_tokens():
    prefill = synthetic_prefill(context=100, layers=2, kv_heads=2, seed=3)
    total = 4 * 37 + 2  # 5 candidates besides the recent window; two heads hold one more
    run = Pipeline.named("chunkkv").run(prefill, Budget.kv_bytes(total * prefill.entry_bytes))
    assert run.accounting.entries.tolist() == [[38, 38], [37, 37]]
    heads = [set(kept_positions(run, prefill, 0, head).tolist()) for head in range(2)]
    assert heads[0] == heads[1]
    wide = Pipeline.named("chunkkv").run(prefill, Budget.entries_per_head(32 + 23))
    for layer in range(2):
        kept = kept_positions(wide, prefill, layer, 0)
        chunk = (kept[kept < 72] - 4) // 10
        # Two whole chunks (one may be the short last one of 8) and a part of the next.
        assert sorted(chunk.unique(return_counts=True)[1].tolist()) in ([3, 10, 10], [5, 8, 10])
