"""Random pipelines at random budgets satisfy the invariants of every compressed cache."""

import dataclasses
import types
import typing
from random import Random
from typing import Any

import torch

from gracekv.allocate import Budget
from gracekv.errors import GracekvError
from gracekv.pipeline import Pipeline
from gracekv.registry import Configurable, Strategy
from gracekv.registry.hyperparameter import bounds_of
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_forest, check_frontier, check_run
from support.covering import cases

PIPELINES = cases(60, 10_000)
# Errors that may refuse a random pipeline, and words of each message.
REFUSALS = {
    "BackendUnavailableError": "'triton'", "BudgetError": "", "ConfigError": "",
    "MissingCaptureError": "has not observed", "NonFiniteError": "beyond 65504",
    "PromptError": "There are no probes", "ShapeError": "do not fit a head dimension",
}  # fmt: skip


def random_pipeline(rng: Random) -> dict[str, Any]:
    """Plain data of a pipeline, which usually works; sometimes its fields are incompatible."""
    data = fields_of(Pipeline, rng, depth=0)
    # Nothing here reads caches, as backends do; tight limits only cost time.
    for name in ("backend", "keep_all"):
        data.pop(name, None)
    return data


def fields_of(cls: type[Configurable], rng: Random, depth: int) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    data = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        stage = isinstance(hint, type) and issubclass(hint, Strategy)
        # Most fields keep their defaults; stages are drawn.
        if rng.random() < (0.7 if stage and not depth else 0.2):
            data[field.name] = value_of(hint, bounds_of(field), rng, depth)
    return data


def value_of(hint: Any, bounds: Any, rng: Random, depth: int) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return None if rng.random() < 0.3 else value_of(rng.choice(inner), bounds, rng, depth)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin is tuple:
        return [value_of(args[0], bounds, rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if isinstance(hint, type) and issubclass(hint, Strategy):
        # A field may hold a strategy, such as the replay of reference queries.
        name = rng.choice([x for x in hint.registry if issubclass(hint.registry.get(x), hint)])
        inside = fields_of(hint.registry.get(name), rng, depth + 1) if depth < 3 else {}
        return {"name": name, **inside}
    if isinstance(hint, type) and issubclass(hint, Configurable):
        return fields_of(hint, rng, depth + 1)
    if hint is bool:
        return rng.random() < 0.5
    low = max(x for x in (bounds and bounds.at_least, bounds and bounds.above, 0) if x is not None)
    highest = (bounds and bounds.at_most, bounds and bounds.below, low + 8)
    high = min(x for x in highest if x is not None)
    if hint is int:
        value = rng.randint(int(low), max(int(low), int(high)))
        return value | 1 if bounds and bounds.odd else value
    if hint is not float:
        return "x"
    # An excluded bound is drawn, too, but rarely.
    ends = [x for x, no in ((low, "above"), (high, "below")) if getattr(bounds, no, None) != x]
    inside = [*ends, *(rng.uniform(low, high) for _ in range(2))]
    return rng.choice([low, high]) if rng.random() < 0.1 else rng.choice(inside)


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
