"""What is registered for each stage."""

import dataclasses

from gracekv import Pipeline, strategies
from gracekv.pipeline.composition import REGISTRIES
from gracekv.registry import Strategy


def test_strategies_lists_every_stage_with_descriptions() -> None:
    listed = strategies()
    assert set(listed) == set(REGISTRIES)
    for stage, names in listed.items():
        assert names, stage
        assert all(line and not line.endswith(("(", ",")) for line in names.values())
    stages = {f.name for f in dataclasses.fields(Pipeline)} & set(REGISTRIES)
    assert stages == set(REGISTRIES)
    assert all(isinstance(getattr(Pipeline.named("gracekv"), stage), Strategy) for stage in stages)
