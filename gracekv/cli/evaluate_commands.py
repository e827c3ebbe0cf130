"""The subcommands `evaluate`, `table` and `ablate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from gracekv.cli.commands import Imports
from gracekv.cli.options import with_shared_options
from gracekv.errors import ConfigError
from gracekv.files import check_output, write_atomically

if TYPE_CHECKING:
    from gracekv.evaluate.experiment import Experiment
    from gracekv.evaluate.row_files import Row

# Fields of a panel that options name and spell as the panel does.
_PANEL = (
    "samples", "seed", "recent_share", "protocol", "max_new_tokens", "generate", "fidelity",
    "truncate", "max_prompt",
)  # fmt: skip
MeasureNames = Annotated[str, Option("--metric", help="What to show, such as score,kl.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `evaluate` and `ablate` run, and where: each field is an option of both commands."""

    out: Annotated[Path, Option(help="Folder of rows; a run in it is continued.")]
    model: Annotated[str | None, Option(help="'smollm2', or a transformers name or folder.")] = None
    tasks: Annotated[str | None, Option(help="Tasks and suites, separated by commas.")] = None
    ratios: Annotated[str, Option(help="Budgets as ratios, such as 4,8,16.")] = ""
    entries: Annotated[str, Option(help="Budgets as entries per head, such as 512,1024.")] = ""
    samples: Annotated[int, Option(min=1, help="Samples of each task and length.")] = 50
    length: Annotated[str, Option(help="Tokens of RULER's samples, such as 4096,8192.")] = "4096"
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.")] = "float32"
    data: Annotated[Path | None, Option(help="Folder with essays/, qa/ and longbench/.")] = None
    seed: Annotated[int, Option(help="Seed of RULER's samples.")] = 42
    recent_share: Annotated[float | None, Option(help="Cap on the recent window's share.")] = None
    protocol: Annotated[str, Option(help="The paper's, or query_agnostic.")] = "query_aware"
    max_new_tokens: Annotated[int | None, Option(min=1, help="Most tokens of an answer.")] = None
    generate: Annotated[bool, Option(help="Generate answers and score them.")] = True
    fidelity: Annotated[bool, Option(help="Feed the reference answer, compare with FullKV.")] = True
    truncate: Annotated[str, Option(help="Long prompts: middle, start, error, skip.")] = "middle"
    max_prompt: Annotated[int | None, Option(min=1, help="Most prompt tokens.")] = None
    shard: Annotated[str | None, Option(help="i/n; default: RANK and WORLD_SIZE.")] = None
    retry_failed: Annotated[bool, Option("--retry-failed", help="Run failed cells again.")] = False
    imports: Imports = None

    def experiment(self, methods: Sequence[str]) -> Experiment:
        """One panel of these methods. Raises `ConfigError` without a model or tasks."""
        from gracekv.evaluate.experiment import Experiment

        if self.model is None or self.tasks is None:
            raise ConfigError("Give --model and --tasks, or everything in a file with --config.")
        return Experiment.from_dict(
            {
                "model": self.model,
                "dtype": self.dtype,
                "data": None if self.data is None else str(self.data),
                "tasks": _list(self.tasks),
                "methods": list(methods),
                "ratios": _numbers(self.ratios, "--ratios", float),
                "entries": _numbers(self.entries, "--entries", int),
                "lengths": _numbers(self.length, "--length", int),
                **{name: getattr(self, name) for name in _PANEL},
            }
        )

    def run(self, experiment: Experiment) -> int:
        """Run what is missing and say how much it was; returns how many cells have failed."""
        from gracekv.evaluate.runner import run
        from gracekv.evaluate.schedule import parse_shard

        done = run(
            experiment,
            self.out,
            shard=parse_shard(self.shard),
            retry_failed=self.retry_failed,
            progress=True,
        )
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
    config: Annotated[Path | None, Option(help="A YAML file instead of options.")] = None,
    methods: Annotated[
        str, Option(help="Recipes, files, or recipe[stage.field=value].")
    ] = "fullkv,gracekv",
) -> None:
    """Run methods on benchmark tasks, resumably. One row a sample, method and budget."""
    from gracekv.evaluate.experiment import Experiment
    from gracekv.evaluate.methods import split_methods

    if config is None:
        experiment = options.experiment(split_methods(methods))
    elif options.model or options.tasks:
        raise ConfigError("Give either --config or --model and --tasks, not both.")
    else:
        experiment = Experiment.load(config)
        if options.data is not None:
            experiment = replace(experiment, data=str(options.data))
    if options.run(experiment):
        raise typer.Exit(1)


def table(
    runs: Annotated[Path, Argument(help="The --out of an evaluation; shards are merged.")],
    format: Annotated[str, Option(help="markdown, latex or csv.")] = "markdown",
    metric: MeasureNames = "score",
    against: Annotated[
        str | None, Option(help="Wins, ties and losses against this method.")
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Also draw the first metric against the ratio.")
    ] = None,
    out: Annotated[Path | None, Option(help="Write here instead of to the screen.")] = None,
) -> None:
    """Show means with 95 % bootstrap intervals on paired samples."""
    from gracekv.evaluate.formats import FORMATS, footer
    from gracekv.evaluate.measures import measure
    from gracekv.evaluate.plots import plot as drawn
    from gracekv.evaluate.row_files import read_rows
    from gracekv.evaluate.tables import make_tables

    if format not in FORMATS:
        raise ConfigError(f"--format takes one of {', '.join(FORMATS)}; got {format!r}.")
    measures = [measure(name) for name in _list(metric)]
    for path in (out, plot):
        if path is not None:
            check_output(path)
    rows = _some(read_rows(runs), runs)
    texts = []
    for shown in measures:
        tables = make_tables(rows, shown, against)
        texts.append(FORMATS[format](tables, shown))
        if plot is not None and shown is measures[0]:
            write_atomically(plot, drawn(tables, shown, plot.suffix))
    if format == "markdown":
        texts.append(footer(rows))
    _show("\n".join(texts), out)


def ablate(
    options: RunOptions,
    base: Annotated[str, Option(help="The method that is varied.")] = "gracekv",
    set_: Annotated[
        list[str] | None,
        Option("--set", help="stage.field=v1,v2: one method a value; may be repeated."),
    ] = None,
    ablations: Annotated[
        bool | None, Option(help="The base's ablation recipes; default: if no --set.")
    ] = None,
    metric: MeasureNames = "score",
) -> None:
    """Run a method and its variants; show paired differences. At 8x if no budget is given."""
    from gracekv.evaluate.formats import deltas, footer
    from gracekv.evaluate.measures import measure
    from gracekv.evaluate.methods import variants
    from gracekv.evaluate.row_files import read_rows

    measures = [measure(name) for name in _list(metric)]
    settings = set_ or []
    methods = variants(base, settings, not settings if ablations is None else ablations)
    if options.model is not None or options.tasks is not None:
        if not options.ratios and not options.entries:
            options = replace(options, ratios="8")
        options.run(options.experiment(methods))
    rows = [row for row in _some(read_rows(options.out), options.out) if row["method"] in methods]
    _show("\n".join([*(deltas(rows, base, shown) for shown in measures), footer(rows)]), None)
    if any(row["error"] is not None for row in rows):
        raise typer.Exit(1)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str, kind: type[float] | type[int]) -> list[Any]:
    try:
        return [kind(part) for part in _list(text)]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas; got {text!r}.") from error


def _some(rows: list[Row], folder: Path) -> list[Row]:
    if not rows:
        raise ConfigError(f"There are no rows under {folder} yet. Run gracekv evaluate first.")
    return rows


def _show(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text)
    else:
        write_atomically(out, text.encode())
