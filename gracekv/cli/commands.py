"""The subcommands of `gracekv`. They import slow modules only when they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import gracekv
from gracekv import recipes
from gracekv.errors import ConfigError
from gracekv.files import check_output, read_text, write_atomically

if TYPE_CHECKING:
    from gracekv import CompressionResult, Pipeline

# Fields of `Accounting` that --json writes by their own names.
_ACCOUNTING = (
    "budget", "spent", "floor_spent", "recent", "metadata_bytes", "full_bytes", "utility", "bound",
)  # fmt: skip

app = typer.Typer(
    help="Compress a language model's KV cache once after prefill.",
    no_args_is_help=True,
    add_completion=False,
    # Rich's tables truncate option names on terminals of 80 columns.
    rich_markup_mode=None,
    # Users need the message, developers the plain traceback.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _import(names: list[str] | None) -> list[str] | None:
    from gracekv.registry.plugins import import_modules

    import_modules(names or ())
    return names


Imports = Annotated[
    list[str] | None,
    Option(
        "--import",
        metavar="MODULE",
        callback=_import,
        is_eager=True,
        help="Import a module that registers strategies or recipes; may be repeated.",
    ),
]
"""The callback imports the modules, so commands need not use the value."""


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"gracekv {gracekv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compress a language model's KV cache once after prefill."""


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder for plot and report.")] = Path("demo-out"),
    max_new_tokens: Annotated[int, Option(min=1, help="Most tokens of each answer.")] = 32,
) -> None:
    """Ask a 135M model about a chapter: full cache, 4x, 8x and 16x."""
    from gracekv.cli.demo import run_demo

    run_demo(out, max_new_tokens=max_new_tokens)


@app.command()
def compress(
    context: Annotated[Path, Option(help="UTF-8 text file with the long context.")],
    question: Annotated[
        str, Option(help="The question; leave it out to ask the saved cache later.")
    ] = "",
    model: Annotated[
        str, Option(help="'smollm2' (embedded), or a transformers name or folder.")
    ] = "smollm2",
    ratio: Annotated[
        str | None, Option(help="Shrink the cache this many times (default 8).")
    ] = None,
    compression_ratio: Annotated[
        str | None, Option(help="Remove this fraction of the cache, as in kvpress.")
    ] = None,
    entries_per_head: Annotated[
        int | None, Option(help="Keep this many entries per KV head and layer, on average.")
    ] = None,
    kv_bytes: Annotated[
        str | None, Option(help="Keep this many bytes of keys and values, such as 64MiB.")
    ] = None,
    instruction: Annotated[str, Option(help="Text before the context; never compressed.")] = "",
    pipeline: Annotated[
        str | None,
        Option(
            help=f"A recipe's name, or a .yaml, .toml or .json file; default: {recipes.DEFAULT}, "
            f"without a question {recipes.DEFAULT_WITHOUT_QUESTION}, with -allocated for budgets "
            f"in bytes and for 16-bit models."
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Most tokens of the answer.")] = 64,
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.")] = "float32",
    json_out: Annotated[
        Path | None, Option("--json", help="Also write answer and figures to this file.")
    ] = None,
    save: Annotated[
        Path | None,
        Option(help="Also save the compressed cache, for gracekv ask, chat and generate."),
    ] = None,
    report: Annotated[
        Path | None, Option(help="Also write an HTML page that shows what was kept.")
    ] = None,
    beyond_positions: Annotated[
        bool, Option(help="Accept a prompt longer than the model was trained for.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        Option(help="Recipe or file to compare in the report; may be repeated."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Compress one prompt's cache, then ask a question or save it."""
    text = read_text(context)
    if not question and save is None and report is None:
        raise ConfigError(
            "There is nothing to do with the cache: add --question, --save to ask it later, or "
            "--report."
        )
    if compare and report is None:
        raise ConfigError("--compare writes to a report: add --report page.html.")
    for out in filter(None, (save, report, json_out)):
        check_output(out)
    # Imported here, since they take seconds, which a mistyped path should not cost.
    from gracekv.allocate import Budget
    from gracekv.hf import loading
    from gracekv.hf.compress import per_byte
    from gracekv.prefill.supported import check_model

    named = [*([] if pipeline is None else [pipeline]), *(compare or [])]
    _pipelines(named)  # refuses what cannot be read before the model is loaded
    if all(x is None for x in (ratio, compression_ratio, entries_per_head, kv_bytes)):
        ratio = "8"
    sizes = {"ratio": ratio, "compression_ratio": compression_ratio}
    amount = Budget.of({**sizes, "entries_per_head": entries_per_head, "kv_bytes": kv_bytes})
    loaded, tokenizer = loading.load_model(model, dtype)
    if pipeline is None:
        check_model(loaded)
        by_byte = per_byte(loaded, amount)
        named = [recipes.default(question=bool(question), per_byte=by_byte), *named]
    pipelines, name = _pipelines(named), named[0]
    prompt = gracekv.Prompt.from_chat(
        tokenizer, context=text, question=question, instruction=instruction
    )
    with _progress() as progress:
        options = gracekv.CaptureOptions(progress=progress, beyond_positions=beyond_positions)
        shared: dict[str, Any] = {"budget": amount, "capture": options}
        # A single pipeline needs no shared prefill, so it compresses layer by layer.
        if len(pipelines) > 1:
            needs = reduce(or_, (pipe.needs() for pipe in pipelines.values()))
            shared["prefill"] = gracekv.capture(loaded, prompt, needs, options)
        results = {
            one: gracekv.compress(loaded, prompt, pipeline=pipe, **shared)
            for one, pipe in pipelines.items()
        }
    result = results[name]
    if save is not None:
        result.save(save)
    asked = results if question else {}
    answers = {recipe: one.generate(max_new_tokens) for recipe, one in asked.items()}
    if question:
        typer.echo(answers[name])
    if report is not None and compare:
        gracekv.report.compare(results, report, answers=answers)
    elif report is not None:
        result.report(report, answer=answers.get(name))
    facts = _facts(result)
    typer.echo(
        f"\n{name} kept {facts['spent']:,} of {facts['full_entries']:,} context entries "
        f"(budget {facts['budget']:,}); {facts['kv_bytes']:,} bytes of keys and values and "
        f"{facts['metadata_bytes']:,} of metadata, full cache {facts['full_bytes']:,}"
        f"{'' if result.accounting.budget_bytes is None else ' in 16 bits'}; "
        f"prefill {facts['seconds']['prefill']:.2f} s, "
        f"compression {facts['construction_seconds']:.2f} s",
        err=True,
    )
    if json_out is not None:
        plain = pipelines[name].to_dict()
        record = {"answer": answers.get(name), "model": model, "pipeline": plain, **facts}
        write_atomically(json_out, (json.dumps(record, indent=2) + "\n").encode())


def _pipelines(names: list[str]) -> dict[str, Pipeline]:
    """Load pipelines by recipe name or file; raises `ConfigError` for duplicates."""
    from gracekv.pipeline.config import load_pipeline

    pipelines = {one: load_pipeline(one) for one in names}
    if len(pipelines) < len(names):
        raise ConfigError(
            f"--pipeline and each --compare must name different pipelines; got "
            f"{', '.join(map(repr, names))}."
        )
    return pipelines


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A callback that draws a progress bar while a prompt of several chunks is read."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Reading the context", visible=False)

        def progress(done: int, total: int) -> None:
            # A prompt of one chunk is done at the first call.
            bar.update(task, completed=done, total=total, visible=done < total)

        yield progress


@app.command("list")
def list_(
    stage: Annotated[str | None, Option(help="Show only this stage.")] = None,
    recipes: Annotated[bool, Option("--recipes", help="Show only the recipes.")] = False,
    imports: Imports = None,
) -> None:
    """List the strategies of each stage, and the recipes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gracekv import recipes as named
    from gracekv.registry import suggestion

    stages = gracekv.strategies()
    if stage is not None and stage not in stages:
        raise ConfigError(
            f"Unknown stage {stage!r}.{suggestion(stage, list(stages))} Stages: "
            f"{', '.join(stages)}."
        )
    shown: dict[str, list[tuple[str, ...]]] = {}
    if not recipes:
        shown = {x: list(rows.items()) for x, rows in stages.items() if stage in (None, x)}
    if recipes or stage is None:
        found = {name: named.find(name) for name in named.names()}
        # Sources have a column of their own.
        shown["recipes"] = [(name, x.summary, x.source) for name, x in found.items()]
    console = Console()
    for title, lines in shown.items():
        table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def _facts(result: CompressionResult) -> dict[str, Any]:
    """Accounting and timings as plain data."""
    kept, context = result.accounting, result.prompt.spans.context_length
    return {
        **{name: getattr(kept, name) for name in _ACCOUNTING},
        "full_entries": kept.entries.numel() * context,
        "entries_per_head": kept.entries.tolist(),
        "kv_bytes": kept.bytes,
        "seconds": dict(result.timings.as_dict()),
        "construction_seconds": result.timings.construction,
    }
