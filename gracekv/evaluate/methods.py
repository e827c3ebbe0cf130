"""Methods by name: a recipe, a file, or either with some fields changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gracekv import recipes
from gracekv.errors import ConfigError
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline

_SPEC = re.compile(r"(?P<base>[^\[\]]+?)(?:\[(?P<changes>[^\[\]]*)\])?")


def parse_method(spec: str, recent_share: float | None = None) -> Pipeline:
    """The pipeline of ``recipe``, ``file.yaml``, or ``recipe[stage.field=value;stage=name]``.

    `recent_share` replaces the share of the budget that the recent window may take. Raises
    `ConfigError` if `spec` cannot be read, `UnknownStrategyError` for an unknown recipe or
    strategy.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ConfigError(
            f"A method is a recipe or a file, with changes in brackets such as "
            f"gracekv[value.lambda_graph=0.1;floor=none]; got {spec!r}."
        )
    pipeline = load_pipeline(match["base"])
    for change in filter(None, (match["changes"] or "").split(";")):
        pipeline = changed(pipeline, change)
    if recent_share is not None:
        pipeline = replace(pipeline, window=replace(pipeline.window, share=recent_share))
    return pipeline


def changed(pipeline: Pipeline, change: str) -> Pipeline:
    """`pipeline` with one ``stage.field=value`` or ``stage=name`` applied.

    Values are read as YAML: numbers, true, null, lists. Raises `ConfigError`.
    """
    import yaml

    path, _, text = change.partition("=")
    stage, *fields = (name.strip() for name in path.split("."))
    data: dict[str, Any] = pipeline.to_dict()
    inside = isinstance(data.get(stage), dict)
    if not text or len(fields) > 1 or (fields and not inside):
        raise ConfigError(
            f"A change is written stage.field=value or stage=name, such as floor.alpha=0.4; got "
            f"{change!r}. Stages: {', '.join(x for x, y in data.items() if isinstance(y, dict))}."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} in {change!r} is not a value: {error}") from error
    return Pipeline.from_dict(
        {**data, stage: {**data[stage], fields[0]: value} if fields else value}
    )


def split_methods(text: str) -> list[str]:
    """Method names from a comma-separated list; commas inside brackets belong to a name."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def sweep(base: str, settings: Sequence[str]) -> list[str]:
    """One method for each value of each ``stage.field=v1,v2``: one change at a time.

    Raises `ConfigError` for what cannot be read.
    """
    match = _SPEC.fullmatch(base)
    found = []
    for setting in settings:
        path, _, values = setting.partition("=")
        if match is None or not values:
            raise ConfigError(
                f"--set takes stage.field=v1,v2, such as value.lambda_graph=0.1,0.3, and varies "
                f"a recipe or file; got {setting!r} of {base!r}."
            )
        kept = f"{match['changes']};" if match["changes"] else ""
        found += [f"{match['base']}[{kept}{path}={value}]" for value in split_methods(values)]
    return found


def variants(base: str, settings: Sequence[str], ablations: bool) -> list[str]:
    """The base method, its ablation recipes (`BASE-no-...`), and one method a swept value.

    Raises `ConfigError` if nothing is left to compare with the base.
    """
    methods = [base]
    if ablations:
        methods += [name for name in recipes.names() if name.startswith(f"{base}-no-")]
    methods += sweep(base, settings)
    if len(methods) == 1:
        raise ConfigError(
            f"There are no ablation recipes of {base!r}. Give --set stage.field=v1,v2, or a base "
            f"with recipes {base}-no-..."
        )
    return methods
