"""One strategy per file, which is named after it; strategies convert to plain data and back."""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import pytest

import gracekv
from gracekv.errors import ConfigError
from gracekv.pipeline.composition import REGISTRIES
from gracekv.registry import Strategy
from gracekv.registry.hyperparameter import bounds_of, parts_of

EVERY = [(stage, name) for stage, registry in REGISTRIES.items() for name in registry]

# Not imported to find strategies; the last ones need vLLM or lm-eval.
ELSEWHERE = (
    "gracekv.testing", "gracekv.cli.demo", "gracekv.vllm.backend", "gracekv.vllm.connector",
    "gracekv.vllm.gpu_backend", "gracekv.vllm.scheduling",
    "gracekv.lm_eval.model",
)  # fmt: skip


@pytest.mark.parametrize(("stage", "name"), EVERY)
def test_file_is_named_after_its_strategy(stage, name):
    cls = REGISTRIES[stage].get(name)
    stem = cls.__module__.rpartition(".")[2]
    # A Python keyword gets an underscore.
    assert stem in (name, f"{name}_"), f"{stage} {name!r} lives in {cls.__module__}"


def test_one_strategy_a_file():
    homes = {}
    for stage, name in EVERY:
        homes.setdefault(REGISTRIES[stage].get(name).__module__, []).append((stage, name))
    assert not {home: found for home, found in homes.items() if len(found) > 1}


def test_every_concrete_strategy_is_registered():
    # Importing every file finds strategies that are not exported.
    for _, name, _ in pkgutil.walk_packages(gracekv.__path__, "gracekv."):
        if "triton" not in name and not name.startswith(ELSEWHERE):
            importlib.import_module(name)

    def below(cls):
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    concrete = {
        cls
        for cls in below(Strategy)
        if not inspect.isabstract(cls) and cls.__module__.startswith("gracekv.")
    }
    assert concrete == {REGISTRIES[stage].get(name) for stage, name in EVERY}


@pytest.mark.parametrize(("stage", "name"), EVERY)
def test_is_final_and_has_a_short_line_for_users(stage, name):
    cls = REGISTRIES[stage].get(name)
    assert [base for base in cls.__mro__ if vars(base).get("__final__")] == [cls]
    assert len(cls.summary()) <= 100


def outside(bounds):
    """Numbers that a field with these bounds refuses."""
    yield math.nan
    yield from (x - 1 for x in (bounds.at_least,) if x is not None)
    yield from (x + 1 for x in (bounds.at_most,) if x not in (None, math.inf))
    yield from (x for x in (bounds.above, bounds.below) if x is not None)
    yield from (2,) * bounds.odd


@pytest.mark.parametrize(("stage", "name"), EVERY)
def test_numbers_outside_their_bounds_are_refused_by_name(stage, name):
    for part in parts_of(REGISTRIES[stage].build(name)):
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            bounds, default = bounds_of(field), getattr(part, field.name)
            for bad in () if bounds is None else outside(bounds):
                value = (bad,) if isinstance(default, tuple) else bad
                with pytest.raises(ConfigError, match=f"{type(part).__name__}.{field.name} takes"):
                    dataclasses.replace(part, **{field.name: value})
