"""Random pipelines: random strategies in every stage, random values in their fields."""

import dataclasses
import types
import typing
from random import Random
from typing import Any

from gracekv.pipeline import Pipeline
from gracekv.registry import Configurable, Strategy
from gracekv.registry.hyperparameter import bounds_of


def random_pipeline(rng: Random) -> dict[str, Any]:
    """Plain data of a pipeline, which usually works; sometimes its fields are incompatible."""
    data = _fields(Pipeline, rng, depth=0)
    # Nothing here reads caches, as backends do; tight limits only cost time.
    for name in ("backend", "keep_all"):
        data.pop(name, None)
    return data


def _fields(cls: type[Configurable], rng: Random, depth: int) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    data = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        stage = isinstance(hint, type) and issubclass(hint, Strategy)
        # Most fields keep their defaults; stages are drawn.
        if rng.random() < (0.7 if stage and not depth else 0.2):
            data[field.name] = _value(hint, bounds_of(field), rng, depth)
    return data


def _value(hint: Any, bounds: Any, rng: Random, depth: int) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return None if rng.random() < 0.3 else _value(rng.choice(inner), bounds, rng, depth)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin is tuple:
        return [_value(args[0], bounds, rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if isinstance(hint, type) and issubclass(hint, Strategy):
        # A field may hold a strategy, such as the replay of reference queries.
        name = rng.choice([x for x in hint.registry if issubclass(hint.registry.get(x), hint)])
        inside = _fields(hint.registry.get(name), rng, depth + 1) if depth < 3 else {}
        return {"name": name, **inside}
    if isinstance(hint, type) and issubclass(hint, Configurable):
        return _fields(hint, rng, depth + 1)
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
