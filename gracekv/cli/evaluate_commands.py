"""The subcommands `evaluate`, `table` and `ablate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gracekv.cli.commands import Dtype, Imports, with_shared_options
from gracekv.errors import ConfigError
from gracekv.files import check_output, write_atomically

if TYPE_CHECKING:
    from gracekv.evaluate.experiment import Experiment
    from gracekv.evaluate.measures import Measure
    from gracekv.evaluate.row_files import Row

# Options that may be combined with a file; all others are fields of an experiment.
_BESIDE = ("out", "data", "shard", "retry_failed", "imports")
# torchrun sets this variable in each of its processes.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
MeasureNames = Annotated[str, Option("--metric", help="Metrics to show, such as score,kl.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that `evaluate` and `ablate` share, one per field."""

    out: Annotated[Path, Option(help="Folder for the rows; an interrupted run continues.")]
    model: Annotated[str | None, Option(help="'smollm2', or a transformers name or folder.")] = None
    tasks: Annotated[str | None, Option(help="Tasks and suites, separated by commas.")] = None
    ratios: Annotated[str, Option(help="Budgets as ratios, such as 4,8,16.")] = ""
    entries: Annotated[str, Option(help="Budgets as entries per head, such as 512,1024.")] = ""
    samples: Annotated[int, Option(min=1, help="Samples of each task and length.")] = 50
    length: Annotated[str, Option(help="Lengths of RULER's samples, such as 4096,8192.")] = "4096"
    dtype: Dtype = "float32"
    data: Annotated[Path | None, Option(help="Folder with essays/, qa/ and longbench/.")] = None
    seed: Annotated[int, Option(help="Seed of RULER's samples.")] = 42
    protocol: Annotated[str, Option(help="query_aware or query_agnostic.")] = "query_aware"
    max_new_tokens: Annotated[int | None, Option(min=1, help="Maximum answer tokens.")] = None
    generate: Annotated[bool, Option(help="Generate and score answers.")] = True
    fidelity: Annotated[bool, Option(help="Compare with FullKV on the reference answer.")] = True
    truncate: Annotated[str, Option(help="Long prompts: middle, start or error.")] = "middle"
    max_prompt: Annotated[int | None, Option(min=1, help="Maximum prompt tokens.")] = None
    shard: Annotated[str | None, Option(help="i/n; default: RANK and WORLD_SIZE.")] = None
    retry_failed: Annotated[bool, Option("--retry-failed", help="Run failed cells again.")] = False
    imports: Imports = None

    def experiment(self, methods: Sequence[str]) -> Experiment:
        """One panel of these methods. Raises `ConfigError` without a model or tasks."""
        from gracekv.evaluate.experiment import Experiment

        if self.model is None or self.tasks is None:
            raise ConfigError("Give --model and --tasks; gracekv evaluate also takes --config.")
        given = {x: y for x, y in vars(self).items() if x not in (*_BESIDE, "length")}
        given |= {
            "data": None if self.data is None else str(self.data),
            "tasks": _list(self.tasks),
            "methods": list(methods),
            "ratios": _numbers(self.ratios, "--ratios", float),
            "entries": _numbers(self.entries, "--entries", int),
            "lengths": _numbers(self.length, "--length", int),
        }
        return Experiment.from_dict(given)

    def run(self, experiment: Experiment) -> int:
        """Run the missing cells and print their number; returns the number of failed cells."""
        from gracekv.evaluate.runner import parse_shard, run

        shard, again = parse_shard(self.shard), self.retry_failed
        done = run(experiment, self.out, shard=shard, retry_failed=again, progress=True)
        typer.echo(
            f"{done.written} cells run, {done.kept} kept from before, {done.failed} failed; see "
            f"gracekv table {done.folder}",
            err=True,
        )
        return done.failed


def register(app: typer.Typer) -> None:
    """Add the three commands to the console application."""
    app.command()(with_shared_options(evaluate))
    app.command()(table)
    app.command()(with_shared_options(ablate))


def evaluate(
    options: RunOptions,
    context: typer.Context,
    config: Annotated[Path | None, Option(help="A YAML file instead of options.")] = None,
    methods: Annotated[
        str, Option(help="Recipes, files, or recipe[stage.field=value].")
    ] = "fullkv,gracekv-plus,gracekv",
) -> None:
    """Run methods on benchmark tasks, resumably. Writes a row per sample, method and budget."""
    from gracekv.evaluate.experiment import Experiment, split_methods

    if config is None:
        experiment = options.experiment(split_methods(methods))
    elif names := ", ".join(_given(context, "methods")):
        raise ConfigError(f"Give either --config or {names}, not both: the file sets these.")
    else:
        experiment = Experiment.load(config)
        if options.data is not None:
            experiment = replace(experiment, data=str(options.data))
    _end(failed=bool(options.run(experiment)))


def table(
    runs: Annotated[Path, Argument(help="The --out of an evaluation; shards are merged.")],
    format: Annotated[Literal["markdown", "csv"], Option(help="Output format.")] = "markdown",
    metric: MeasureNames = "score",
    against: Annotated[
        str | None, Option(help="Also show each method's difference from this one.")
    ] = None,
    out: Annotated[Path | None, Option(help="Write to this file instead of the screen.")] = None,
) -> None:
    """Show means with 95 % bootstrap intervals on paired samples."""
    if out is not None:
        check_output(out)
    text = _tables(_rows(runs), _measures(metric), against, format)
    typer.echo(text) if out is None else write_atomically(out, text.encode())


def ablate(
    options: RunOptions,
    context: typer.Context,
    base: Annotated[str, Option(help="The method to vary.")] = "gracekv",
    set_: Annotated[
        list[str] | None,
        Option("--set", help="stage.field=v1,v2: one method per value; may be repeated."),
    ] = None,
    ablations: Annotated[
        bool | None, Option(help="Also run the base's ablation recipes; default: if no --set.")
    ] = None,
    metric: MeasureNames = "score",
) -> None:
    """Run a method and its variants; show paired differences. At 8x if no budget is given.

    Under torchrun, `gracekv table` shows them afterwards.
    """
    from gracekv.evaluate.experiment import variants

    settings, measures = set_ or [], _measures(metric)
    methods = variants(base, settings, not settings if ablations is None else ablations)
    if _given(context) or options.retry_failed or options.shard:
        if not options.ratios and not options.entries:
            options = replace(options, ratios="8")
        options.run(options.experiment(methods))
    if _TORCHRUN in os.environ:  # other processes may still make rows
        return
    rows = _rows(options.out, methods)
    if missing := sorted(set(methods).difference(row["method"] for row in rows)):
        typer.echo(f"No rows of {', '.join(missing)}. Give --model and --tasks.", err=True)
    typer.echo(_tables(rows, measures, base, "markdown"))
    _end(failed=any(row["error"] is not None for row in rows))


def _end(*, failed: bool) -> None:
    """Exit with 1 if cells have failed; not under torchrun, which would end other processes."""
    if failed and _TORCHRUN not in os.environ:
        raise typer.Exit(1)


def _given(context: typer.Context, *others: str) -> list[str]:
    """The given options that an experiment's file would contain, and those of `others`."""
    names = [*(x.name for x in fields(RunOptions) if x.name not in _BESIDE), *others]
    source = context.get_parameter_source
    # --out is always given.
    return [f"--{x.replace('_', '-')}" for x in names if source(x) is source("out")]


def _measures(metric: str) -> list[Measure]:
    from gracekv.evaluate.measures import measure

    return [measure(name) for name in _list(metric) or [metric]]


def _tables(rows: list[Row], measures: list[Measure], against: str | None, format: str) -> str:
    from gracekv.evaluate.formats import FORMATS, about, footer
    from gracekv.evaluate.measures import MEASURES
    from gracekv.evaluate.tables import make_tables

    tables = [make_tables(rows, x, against) for x in measures]
    held = [name for name, x in MEASURES.items() if any(x.read(row) is not None for row in rows)]
    if held and not any(tables):
        asked, known = (", ".join(names) for names in ((x.name for x in measures), held))
        raise ConfigError(f"No row holds {asked}. Use --metric with one of: {known}.")
    for x, found in zip(measures, tables, strict=True):
        if not found:
            typer.echo(f"No row holds {x.name}.", err=True)
        elif against and not any(against in table.methods for table in found):
            typer.echo(f"No row of {against!r} holds {x.name}: no differences.", err=True)
    texts = [FORMATS[format](table, x) for table, x in zip(tables, measures, strict=True)]
    if format == "markdown":
        return "\n".join([*texts, footer(rows)])
    # Notes go to stderr, apart from the numbers; one header for all.
    for x, found in zip(measures, tables, strict=True):
        notes = [f"{y.title}, {x.title}: {about(y)}\n" for y in found]
        typer.echo("".join(notes), nl=False, err=True)
    typer.echo(footer(rows), err=True)
    return "".join(texts[:1] + [text.partition("\n")[2] for text in texts[1:]])


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str, kind: type[float] | type[int]) -> list[Any]:
    try:
        return [kind(part) for part in _list(text)]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas; got {text!r}.") from error


def _rows(folder: Path, methods: Sequence[str] | None = None) -> list[Row]:
    from gracekv.evaluate.row_files import latest, read_rows

    rows = latest(read_rows(folder)).values()
    found = [row for row in rows if methods is None or row["method"] in methods]
    if not found:
        of = f" of {', '.join(methods)}" if methods else ""
        raise ConfigError(f"There are no rows{of} under {folder} yet. Run gracekv evaluate first.")
    return found
