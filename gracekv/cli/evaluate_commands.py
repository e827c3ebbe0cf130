"""The subcommands `evaluate`, `table` and `ablate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracekv.cli.options import Imports
from gracekv.errors import ConfigError
from gracekv.files import write_atomically

if TYPE_CHECKING:
    from gracekv.evaluate.experiment import Experiment
    from gracekv.evaluate.row_files import Row

Model = Annotated[str | None, typer.Option(help="'smollm2', or a transformers name or folder.")]
Tasks = Annotated[str | None, typer.Option(help="Tasks and suites, separated by commas.")]
Ratios = Annotated[str, typer.Option(help="Budgets as ratios, such as 4,8,16.")]
Entries = Annotated[str, typer.Option(help="Budgets as entries per head, such as 512,1024.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples of each task and length.")]
Length = Annotated[str, typer.Option(help="Total tokens of RULER's samples, such as 4096,8192.")]
Out = Annotated[Path, typer.Option(help="Folder of rows; a run in it is continued.")]
Data = Annotated[Path | None, typer.Option(help="Folder with essays/, qa/ and longbench/.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option(help="Seed of RULER's samples.")]
Share = Annotated[
    float | None, typer.Option(help="Most of the budget that the recent window may take.")
]
Protocol = Annotated[str, typer.Option(help="query_aware (the paper's) or query_agnostic.")]
Cap = Annotated[int | None, typer.Option(min=1, help="Lower cap on generated tokens.")]
Generate = Annotated[bool, typer.Option(help="Generate answers and score them.")]
Fidelity = Annotated[bool, typer.Option(help="Feed the reference answer, compare with FullKV.")]
Truncate = Annotated[str, typer.Option(help="Prompts too long: middle, start, error or skip.")]
MaxPrompt = Annotated[int | None, typer.Option(min=1, help="Most prompt tokens.")]
ShardOption = Annotated[
    str | None, typer.Option(help="i/n: this process's part; default RANK and WORLD_SIZE.")
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again.")]
Workers = Annotated[
    int | None, typer.Option("--ray", min=1, help="Spread samples over this many Ray workers.")
]
MeasureNames = Annotated[str, typer.Option("--metric", help="What to show, such as score,kl.")]


def register(app: typer.Typer) -> None:
    """Add the three commands to the console application."""
    app.command()(evaluate)
    app.command()(table)
    app.command()(ablate)


def evaluate(
    out: Out,
    config: Annotated[Path | None, typer.Option(help="A YAML file instead of options.")] = None,
    model: Model = None,
    tasks: Tasks = None,
    methods: Annotated[
        str, typer.Option(help="Recipes, files, or recipe[stage.field=value].")
    ] = "fullkv,gracekv",
    ratios: Ratios = "",
    entries: Entries = "",
    samples: Samples = 50,
    length: Length = "4096",
    dtype: Dtype = "float32",
    data: Data = None,
    seed: Seed = 42,
    recent_share: Share = None,
    protocol: Protocol = "query_aware",
    max_new_tokens: Cap = None,
    generate: Generate = True,
    fidelity: Fidelity = True,
    truncate: Truncate = "middle",
    max_prompt: MaxPrompt = None,
    shard: ShardOption = None,
    retry_failed: Retry = False,
    ray: Workers = None,
    imports: Imports = None,
) -> None:
    """Run methods on benchmark tasks; one row a sample, method and budget, resumable."""
    from gracekv.evaluate.experiment import Experiment
    from gracekv.evaluate.methods import split_methods

    if config is not None:
        if model or tasks:
            raise ConfigError("Give either --config or --model and --tasks, not both.")
        experiment = Experiment.load(config)
        if data is not None:
            experiment = Experiment.from_dict({**experiment.to_dict(), "data": str(data)})
    else:
        experiment = _experiment(
            model=model, tasks=tasks, methods=split_methods(methods), ratios=ratios,
            entries=entries, samples=samples, length=length, dtype=dtype, data=data, seed=seed,
            recent_share=recent_share, protocol=protocol, max_new_tokens=max_new_tokens,
            generate=generate, fidelity=fidelity, truncate=truncate, max_prompt=max_prompt,
        )  # fmt: skip
    _run(experiment, out, shard, retry_failed, ray)


def table(
    runs: Annotated[Path, typer.Argument(help="The --out of an evaluation; shards are merged.")],
    format: Annotated[str, typer.Option(help="markdown, latex or csv.")] = "markdown",
    metric: MeasureNames = "score",
    against: Annotated[
        str | None, typer.Option(help="Wins, ties and losses against this method.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the first metric against the ratio.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to the screen.")] = None,
) -> None:
    """Means with 95 % bootstrap intervals on paired samples, in the paper's layout."""
    from gracekv.evaluate.formats import FORMATS, footer
    from gracekv.evaluate.measures import measure
    from gracekv.evaluate.plots import plot as drawn
    from gracekv.evaluate.row_files import read_rows
    from gracekv.evaluate.tables import make_tables

    if format not in FORMATS:
        raise ConfigError(f"--format takes one of {', '.join(FORMATS)}; got {format!r}.")
    measures = [measure(name) for name in _list(metric)]
    rows = _some(read_rows(runs), runs)
    texts = []
    for shown in measures:
        found = make_tables(rows, shown, against)
        texts.append(FORMATS[format](found, shown))
        if plot is not None and shown is measures[0]:
            write_atomically(plot, drawn(found, shown, plot.suffix))
    if format == "markdown":
        texts.append(footer(rows))
    _show("\n".join(texts), out)


def ablate(
    out: Out,
    model: Model = None,
    tasks: Tasks = None,
    base: Annotated[str, typer.Option(help="The method that is varied.")] = "gracekv",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="stage.field=v1,v2: one method a value; may be repeated."),
    ] = None,
    ablations: Annotated[
        bool | None, typer.Option(help="The base's ablation recipes; default: if no --set.")
    ] = None,
    metric: MeasureNames = "score",
    ratios: Ratios = "8",
    entries: Entries = "",
    samples: Samples = 50,
    length: Length = "4096",
    dtype: Dtype = "float32",
    data: Data = None,
    seed: Seed = 42,
    recent_share: Share = None,
    protocol: Protocol = "query_aware",
    max_new_tokens: Cap = None,
    generate: Generate = True,
    fidelity: Fidelity = True,
    truncate: Truncate = "middle",
    max_prompt: MaxPrompt = None,
    shard: ShardOption = None,
    retry_failed: Retry = False,
    ray: Workers = None,
    imports: Imports = None,
) -> None:
    """Run a method and its variants; show the paired differences with 95 % intervals."""
    from gracekv.evaluate.ablate import deltas, variants
    from gracekv.evaluate.formats import footer
    from gracekv.evaluate.measures import measure
    from gracekv.evaluate.row_files import read_rows

    measures = [measure(name) for name in _list(metric)]
    settings = set_ or []
    methods = variants(base, settings, not settings if ablations is None else ablations)
    if model is not None or tasks is not None:
        experiment = _experiment(
            model=model, tasks=tasks, methods=methods, ratios=ratios, entries=entries,
            samples=samples, length=length, dtype=dtype, data=data, seed=seed,
            recent_share=recent_share, protocol=protocol, max_new_tokens=max_new_tokens,
            generate=generate, fidelity=fidelity, truncate=truncate, max_prompt=max_prompt,
        )  # fmt: skip
        _run(experiment, out, shard, retry_failed, ray, fail=False)
    rows = [row for row in _some(read_rows(out), out) if row["method"] in methods]
    _show("\n".join([*(deltas(rows, base, shown) for shown in measures), footer(rows)]), None)
    if any(row["error"] is not None for row in rows):
        raise typer.Exit(1)


def _experiment(
    *,
    model: str | None,
    tasks: str | None,
    methods: Sequence[str],
    ratios: str,
    entries: str,
    length: str,
    dtype: str,
    data: Path | None,
    **panel: Any,
) -> Experiment:
    from gracekv.evaluate.experiment import Experiment

    if model is None or tasks is None:
        raise ConfigError("Give --model and --tasks, or everything in a file with --config.")
    return Experiment.from_dict(
        {
            "model": model,
            "dtype": dtype,
            "data": None if data is None else str(data),
            "tasks": _list(tasks),
            "methods": list(methods),
            "ratios": _numbers(ratios, "--ratios", float),
            "entries": _numbers(entries, "--entries", int),
            "lengths": _numbers(length, "--length", int),
            **panel,
        }
    )


def _run(
    experiment: Experiment,
    out: Path,
    shard: str | None,
    retry_failed: bool,
    ray: int | None,
    fail: bool = True,
) -> None:
    from gracekv.evaluate.runner import run
    from gracekv.evaluate.shards import parse_shard

    done = run(
        experiment,
        out,
        shard=parse_shard(shard),
        retry_failed=retry_failed,
        progress=True,
        ray_workers=ray,
    )
    typer.echo(
        f"{done.written} cells run, {done.kept} kept from before, {done.failed} failed; see "
        f"gracekv table {done.folder}",
        err=True,
    )
    if done.failed and fail:
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
