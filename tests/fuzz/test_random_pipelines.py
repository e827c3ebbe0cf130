"""Random pipelines at random budgets satisfy the invariants of every compressed cache."""

from random import Random

import torch

from gracekv.allocate import Budget
from gracekv.errors import GracekvError
from gracekv.pipeline import Pipeline
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_forest, check_frontier, check_run
from support.covering import cases
from support.random_pipelines import random_pipeline

PIPELINES = cases(60, 10_000)
# Errors that may refuse a random pipeline, and words of each message.
REFUSALS = {
    "BackendUnavailableError": "'triton'", "BudgetError": "", "ConfigError": "",
    "MissingCaptureError": "has not observed", "NonFiniteError": "beyond 65504",
    "PromptError": "There are no probes", "ShapeError": "do not fit a head dimension",
}  # fmt: skip


def random_prefill(rng):
    """A prompt of random shape, possibly without prefix, question or tail."""
    return synthetic_prefill(
        layers=rng.randint(1, 3), kv_heads=rng.randint(1, 3), group=rng.randint(1, 3),
        dim=rng.choice([4, 8]), context=rng.choice([2, 3, 5, 17, 40, 90]),
        prefix=rng.choice([0, 1, 4]), question=rng.choice([0, 1, 8]),
        tail=rng.choice([0, 3]) if rng.random() < 0.5 else 3, seed=rng.randrange(1 << 30),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
    )  # fmt: skip


def random_budget(rng, prefill):
    context, heads = prefill.spans.context_length, prefill.layers * prefill.kv_heads
    kind = rng.choice(["ratio", "removed", "entries", "bytes"])
    if kind == "ratio":
        return Budget.ratio(rng.choice([1, 1.5, 2, 3, 8, 64, 1000]))
    if kind == "removed":
        return Budget.compression_ratio(rng.choice([0.0, 0.25, 0.5, 0.9, 0.99]))
    if kind == "entries":
        return Budget.entries_per_head(rng.randint(1, 2 * context))
    return Budget.kv_bytes(rng.randint(1, heads * context) * prefill.entry_bytes)


def test_random_pipelines_hold_the_invariants(tally):
    for seed in range(PIPELINES):
        rng = Random(seed)
        prefill = random_prefill(rng)
        data = random_pipeline(rng)
        try:
            pipeline = Pipeline.from_dict(data)
            budget = random_budget(rng, prefill)
            with tally:
                run = pipeline.run(prefill, budget)
        except GracekvError as error:
            kind = type(error).__name__
            if kind not in REFUSALS or REFUSALS[kind] not in str(error):
                raise AssertionError(f"seed {seed}: {data}") from error
            tally.add(f"refused ({kind})")
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {data}") from error
        try:
            check_run(run, prefill)
            if run.forest is not None:
                check_forest(run.forest)
            if run.frontier is not None:
                check_frontier(run.frontier)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {data}: {error}") from error
        tally.add("ran")
    # Most others are refused since their budget is below the smallest.
    assert tally.outcomes["ran"] > PIPELINES // 4
