"""`Experiment`: the full description of a run as plain data, with methods by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.errors import ConfigError
from gracekv.evaluate.sample import Truncate
from gracekv.evaluate.tasks import GIVEN, SHARED, Task, expand
from gracekv.files import path_of
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline, parse_file
from gracekv.registry import Configurable, bounded
from gracekv.registry.plugins import import_modules, module_list

_SPEC = re.compile(r"(?P<base>[^\[\]]+?)(?:\[(?P<changes>(?:[^\[\]]|\[[^\[\]]*\])*)\])?")


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one budget: a cell of a table.

    Attributes:
        method: the text that named it, which is its name in tables.
        pipeline: the parsed method.
        budget: the context's budget, or None if the method keeps everything.
    """

    method: str
    pipeline: Pipeline
    budget: Budget | None

    @property
    def column(self) -> str:
        """The table's column: "8x", "512 entries", or "full"."""
        if self.budget is None:
            return "full"
        amount = float(self.budget.amount)
        return f"{amount:g}x" if self.budget.kind == "ratio" else f"{amount:g} entries"


@dataclass(frozen=True, slots=True)
class Panel(Configurable):
    """Tasks, and the methods to compare on them.

    Attributes:
        tasks: names of tasks and suites.
        methods: methods as `parse_method` reads them.
        ratios: budgets as ratios; 8 keeps an eighth of the context's entries.
        entries: budgets as entries per head.
        lengths: total tokens of RULER's samples.
        samples: number of samples of each task and length.
        first: number of the first sample, to run on other given texts; generated texts depend on
            `seed`.
        seed: seed of the generated samples.
        protocol: "query_aware" prefills the whole prompt before compressing, as the paper does;
            "query_agnostic" compresses before the question is seen, except for the one token
            after the context, so that several questions can be asked of one cache. They rank
            methods differently and never share a table.
        recent_share: maximum share of the budget for the recent window, in every method whose
            brackets do not set it, or None for each method's own.
        generate: whether answers are generated and scored.
        max_new_tokens: a lower cap than the tasks' own, or None. The cap is part of set recall,
            since nothing else penalises long answers.
        fidelity: whether the reference answer is fed over every cache, to compare with FullKV.
        answer_words: maximum words of the reference answer to feed.
        max_prompt: maximum prompt tokens, or None for the model's positions.
        truncate: how longer prompts are handled: "middle", "start" or "error".

    Raises:
        ConfigError: a field has a value that is not allowed.
    """

    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("fullkv", "gracekv-plus", "gracekv")
    ratios: tuple[float, ...] = ()
    entries: tuple[int, ...] = ()
    lengths: tuple[int, ...] = bounded((4096,), at_least=1)
    samples: int = bounded(50, at_least=1)
    first: int = bounded(0, at_least=0)
    seed: int = 42
    protocol: Literal["query_aware", "query_agnostic"] = "query_aware"
    recent_share: float | None = None
    generate: bool = True
    max_new_tokens: int | None = bounded(None, at_least=1)
    fidelity: bool = True
    answer_words: int = bounded(48, at_least=1)
    max_prompt: int | None = bounded(None, at_least=1)
    truncate: Truncate = "middle"

    def check(self) -> None:
        expand(self.tasks)
        for name in ("tasks", "methods"):
            if not getattr(self, name):
                raise ConfigError(f"An experiment needs at least one of {name}; got none.")
        if self.protocol == "query_aware" and (shared := set(expand(self.tasks)) & set(SHARED)):
            raise ConfigError(
                f"{', '.join(sorted(shared))} ask several questions of one cache, which is "
                f"compressed before any is known. Use protocol='query_agnostic'."
            )
        if not self.generate and not self.fidelity:
            raise ConfigError("generate and fidelity are both off: there is nothing to measure.")
        if not (cells := self.cells()):
            raise ConfigError(
                f"The methods {', '.join(self.methods)} need a budget. Give ratios such as 4,8,16 "
                f"or entries such as 512."
            )
        if len({(cell.method, cell.column) for cell in cells}) < len(cells):
            raise ConfigError(f"A method or budget is named twice: {', '.join(self.methods)}.")

    def cells(self) -> list[Cell]:
        """Every method at every budget; methods that keep everything appear once."""
        budgets = [Budget.ratio(ratio) for ratio in self.ratios]
        budgets += [Budget.entries_per_head(entries) for entries in self.entries]
        cells = []
        for spec in self.methods:
            pipeline = parse_method(spec, self.recent_share)
            own: list[Budget | None] = [None] if pipeline.keep_all else [*budgets]
            cells += [Cell(spec.strip(), pipeline, budget) for budget in own]
        return cells

    def all_tasks(self) -> Iterator[Task]:
        """Every task at every length."""
        for name in expand(self.tasks):
            for length in (None,) if name.partition(":")[0] in GIVEN else self.lengths:
                yield Task(name, length, self.seed)


@dataclass(frozen=True, slots=True)
class PendingSample:
    """One sample and the cells that have no row yet.

    Attributes:
        panel: the settings.
        task: the sample's task.
        index: its number.
        cells: the cells without a row, in the panel's order.
        prompt_hash: the prompt hash in earlier rows of this sample, or None.
    """

    panel: Panel
    task: Task
    index: int
    cells: tuple[Cell, ...]
    prompt_hash: str | None


@dataclass(frozen=True)
class Experiment(Configurable):
    """A model and the panels to run on it.

    Attributes:
        model: "smollm2", a transformers name, or a folder.
        panels: tasks and methods to run.
        dtype: dtype of the weights: "float32", "bfloat16" or "float16".
        data: folder of essays, questions and LongBench files; see `Sources`.
        imports: modules to import first because they register strategies or recipes.

    Raises:
        ConfigError: there is no panel.
    """

    model: str
    panels: tuple[Panel, ...]
    dtype: str = "float32"
    data: str | None = None
    imports: tuple[str, ...] = ()

    def check(self) -> None:
        if not self.panels:
            raise ConfigError("An experiment needs at least one panel; got none.")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; instead of `panels`, takes one panel's fields at the top level.

        Raises `ConfigError` for an unknown field, a value of the wrong type, or a missing model;
        `PluginError` for a module in `imports` that cannot be imported.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"An experiment is a mapping of its fields; got {data!r}.")
        names = {field.name for field in dataclasses.fields(cls)}
        if "panels" not in data:
            rest = {key: value for key, value in data.items() if key not in names}
            data = {k: v for k, v in data.items() if k in names} | {"panels": [rest]}
        if "model" not in data:
            raise ConfigError("An experiment needs a model: 'smollm2', a name, or a folder.")
        # Before the panels are read: they may name what these modules register.
        import_modules(module_list(data.get("imports", ()), "an experiment"))
        return super().from_dict(data)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """An experiment from a YAML, TOML or JSON file; `ConfigError` if it cannot be read."""
        return cls.from_dict(parse_file(path_of(path)))


def parse_method(spec: str, recent_share: float | None = None) -> Pipeline:
    """The pipeline of ``recipe``, ``file.yaml``, or ``recipe[stage.field=value;stage=name]``.

    `recent_share` replaces the share of the budget that the recent window may take, unless a change
    sets it. Raises `ConfigError` if `spec` cannot be read, `UnknownStrategyError` for an unknown
    recipe or strategy.
    """
    if (match := _SPEC.fullmatch(spec.strip())) is None:
        raise ConfigError(
            f"A method is a recipe or a file, with changes in brackets such as "
            f"gracekv[value.lambda_graph=0.1;floor=none]; got {spec!r}."
        )
    data, changes = load_pipeline(match["base"]).to_dict(), match["changes"] or ""
    for change in filter(None, changes.split(";")):
        data = _changed(data, change)
    pipeline = Pipeline.from_dict(data)
    if recent_share is None or re.search(r"\bwindow\b[^;]*\bshare\b", changes):
        return pipeline
    window = dataclasses.replace(pipeline.window, share=recent_share)
    return dataclasses.replace(pipeline, window=window)


def _changed(data: dict[str, Any], change: str) -> dict[str, Any]:
    """A pipeline's `data` with one ``stage.field=value`` or ``stage=name`` applied.

    Values are read as YAML: numbers, true, null, lists. Raises `ConfigError`.
    """
    import yaml

    path, _, text = change.partition("=")
    stage, *fields = (name.strip() for name in path.split("."))
    # An earlier change may have set the stage to a name.
    own: Any = {"name": x} if isinstance(x := data.get(stage), str) else x
    if not text or len(fields) > 1 or (fields and not isinstance(own, dict)):
        raise ConfigError(
            f"A change is written stage.field=value or stage=name, such as floor.alpha=0.4; got "
            f"{change!r}. Stages: {', '.join(x for x, y in data.items() if isinstance(y, dict))}."
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{text!r} in {change!r} is not a value: {error}") from error
    return data | {stage: {**own, fields[0]: value} if fields else value}


def split_methods(text: str) -> list[str]:
    """Method names from a comma-separated list; commas inside brackets belong to a name."""
    return [x.strip() for x in re.split(r",(?!(?:[^\[\]]|\[[^\[\]]*\])*\])", text) if x.strip()]


def sweep(base: str, settings: Sequence[str]) -> list[str]:
    """One method for each value of each ``stage.field=v1,v2``: one change at a time.

    Raises `ConfigError` for a setting or base that cannot be parsed.
    """
    match = _SPEC.fullmatch(base)
    methods = []
    for setting in settings:
        path, _, values = setting.partition("=")
        if match is None or not values:
            raise ConfigError(
                f"--set takes stage.field=v1,v2, such as value.lambda_graph=0.1,0.3, and varies "
                f"a recipe or file; got {setting!r} of {base!r}."
            )
        changes = f"{match['changes']};" if match["changes"] else ""
        methods += [f"{match['base']}[{changes}{path}={value}]" for value in split_methods(values)]
    return methods


def variants(base: str, settings: Sequence[str], ablations: bool) -> list[str]:
    """The base method, its ablation recipes (`BASE-no-...`), and one method per swept value.

    Raises `ConfigError` if there is nothing to compare with the base.
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
