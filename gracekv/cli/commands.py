"""The subcommands of `gracekv`. They import slow modules only when they run."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

import gracekv
from gracekv import recipes
from gracekv.errors import ConfigError, one_of
from gracekv.files import check_output, read_text

app = typer.Typer(
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


_HELP = "Import a module that registers strategies or recipes; may be repeated."
_IMPORT = Option("--import", metavar="MODULE", callback=_import, is_eager=True, help=_HELP)
# The callback imports the modules, so commands need not use the value.
Imports = Annotated[list[str] | None, _IMPORT]
Dtype = Annotated[str, Option(help="float32 (4 bytes per parameter), bfloat16 or float16.")]


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first argument of `command`, a dataclass, by one keyword per field.

    Typer then turns each into an option.
    """
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = first.annotation
    shared = inspect.signature(options, eval_str=True).parameters

    def called(**given: object) -> None:
        command(options(**{name: given.pop(name) for name in shared}), **given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    called.__signature__ = inspect.Signature([*shared.values(), *keywords])  # type: ignore[attr-defined]
    return called


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
    """Compress a language model's KV cache to a budget, and generate from it."""


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder for the report.")] = Path("demo-out"),
    max_new_tokens: Annotated[int, Option(min=1, help="Maximum tokens of each answer.")] = 32,
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
        str | None, Option(help="Keep 1/RATIO of the context (default 8; without a question 2).")
    ] = None,
    compression_ratio: Annotated[
        str | None, Option(help="Remove this fraction of the cache, as in kvpress.")
    ] = None,
    entries_per_head: Annotated[
        int | None, Option(help="Keep this many entries per KV head and layer, on average.")
    ] = None,
    kv_bytes: Annotated[
        str | None, Option(help="Maximum bytes of the context's keys and values, such as 64MiB.")
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
    max_new_tokens: Annotated[int, Option(min=1, help="Maximum tokens of the answer.")] = 64,
    dtype: Dtype = "float32",
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
    imports: Imports = None,
) -> None:
    """Compress one prompt's cache, then ask a question or save it."""
    text = read_text(context)
    if not question and save is None and report is None:
        raise ConfigError(
            "There is nothing to do with the cache: add --question, --report, or --save for later."
        )
    places = [os.path.realpath(x) for x in (context, save, report) if x is not None]
    if len({*places}) < len(places):
        raise ConfigError("--context, --save and --report must be different files.")
    if any(Path(x) in Path(y).parents for x in places[1:] for y in places[1:]):
        raise ConfigError("One of --save and --report lies inside the other.")
    for out in filter(None, (save, report)):
        check_output(out)
    # Imported here, since they take seconds; a mistyped path should fail before.
    from rich.console import Console
    from rich.progress import Progress

    from gracekv.allocate import Budget, BudgetOptions
    from gracekv.hf import smollm2
    from gracekv.pipeline.config import load_pipeline
    from gracekv.registry.plugins import foreign_modules

    named = None if pipeline is None else load_pipeline(pipeline)
    sizes: BudgetOptions = {"ratio": ratio, "compression_ratio": compression_ratio}
    sizes |= {"entries_per_head": entries_per_head, "kv_bytes": kv_bytes}
    if all(x is None for x in sizes.values()):
        sizes["ratio"] = "8" if question else "2"
    amount = Budget.of(sizes, sizes)
    loaded, tokenizer = smollm2.load_model(model, dtype)
    prompt = gracekv.Prompt.from_chat(
        tokenizer, context=text, question=question, instruction=instruction
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Reading the context", visible=False)

        def progress(done: int, total: int) -> None:
            # A prompt of one chunk is done at the first call.
            bar.update(task, completed=done, total=total, visible=done < total)

        options = gracekv.CaptureOptions(progress=progress, beyond_positions=beyond_positions)
        result = gracekv.compress(loaded, prompt, pipeline=named, budget=amount, capture=options)
    if save is not None:
        result.save(save)
    answer = result.generate(max_new_tokens) if question else None
    if answer is not None:
        typer.echo(answer)
    if report is not None:
        result.report(report, answer=answer)
    kept, seconds = result.accounting, result.timings
    full = kept.entries.numel() * result.prompt.spans.context_length
    typer.echo(
        f"\n{pipeline or recipes.label(result.pipeline)} kept {kept.spent:,} of {full:,} context "
        f"entries ({kept.budget_text}); {kept.sizes}; "
        f"prefill {seconds.prefill:.2f} s, compression {seconds.construction:.2f} s",
        err=True,
    )
    if save is not None and not question:
        modules = dict.fromkeys([*(imports or ()), *foreign_modules(result.pipeline)])
        more = [word for name in modules for word in ("--import", name)]
        words = ["gracekv", "ask", str(save), "Your question?", "--model", model, *more]
        typer.echo(f"ask about it with: {shlex.join(words)}", err=True)


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

    shown = {x: [[*row] for row in rows.items()] for x, rows in gracekv.strategies().items()}
    if stage is not None:
        one_of("stage", stage, shown)
    found = [(name, named.find(name)) for name in named.names()]
    # Sources have their own column.
    shown["recipes"] = [[name, x.summary, x.source] for name, x in found]
    for title in [x for x in (stage, "recipes" if recipes else None) if x] or shown:
        table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for line in shown[title]:
            table.add_row(*line)
        Console(markup=False, emoji=False).print(table)
