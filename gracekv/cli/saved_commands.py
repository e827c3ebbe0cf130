"""The subcommands that read a saved cache: `generate`, `ask`, `chat` and `export`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

import gracekv
from gracekv.cli.commands import Imports, with_shared_options
from gracekv.errors import CacheError, PromptError
from gracekv.files import check_output

if TYPE_CHECKING:
    from gracekv import BatchResult, CompressionResult


Tokens = Annotated[int, Option(min=1, help="Maximum tokens of an answer.")]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved cache and its model: the arguments that all four commands share."""

    cache: Annotated[Path, Argument(help="A file that gracekv compress --save wrote.")]
    model: Annotated[
        str | None,
        Option(help="'smollm2', or a name or folder; default: the file's, if it is local."),
    ] = None
    dtype: Annotated[
        str | None, Option(help="float32, bfloat16 or float16; default: the file's.")
    ] = None
    imports: Imports = None

    def load(self) -> CompressionResult | BatchResult:
        """Load the model and the result in the file."""
        from gracekv.cache.serialization import read_header
        from gracekv.hf import smollm2

        # Rejects a file that is not a cache before the model is loaded.
        saved = read_header(self.cache).get("model")
        facts = saved if isinstance(saved, dict) else {}
        name = self.model or smollm2.name_of(facts.get("model_name"))
        loaded, tokenizer = smollm2.load_model(name, self.dtype or facts.get("dtype", "float32"))
        return gracekv.load(self.cache, loaded, tokenizer=tokenizer)

    def load_one(self) -> CompressionResult:
        """Load a result of one context; raises `PromptError` for a batch."""
        result = self.load()
        if isinstance(result, gracekv.BatchResult):
            raise PromptError(f"{self.cache} holds {len(result.prompts)} contexts; save one alone.")
        return result


def generate(saved: Saved, max_new_tokens: Tokens = 64) -> None:
    """Answer a saved prompt's own question. Its context is not read."""
    result = saved.load()
    if not all(prompt.has_question for prompt in result.prompts):
        raise PromptError(f"{saved.cache} was saved without a question: use gracekv ask.")
    answer = result.generate(max_new_tokens=max_new_tokens)
    typer.echo(answer if isinstance(answer, str) else "\n\n".join(answer))


def ask(
    saved: Saved,
    questions: Annotated[list[str], Argument(help="Question; may be repeated.")],
    max_new_tokens: Tokens = 64,
) -> None:
    """Ask a context that was saved without a question. It is not read again."""
    answers = saved.load_one().ask(questions, max_new_tokens)
    for question, answer in zip(questions, answers, strict=True):
        typer.echo(answer if len(questions) == 1 else f"> {question}\n{answer}\n")


def chat(saved: Saved, max_new_tokens: Tokens = 256) -> None:
    """Chat about a context that was saved without a question.

    Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the conversation.
    """
    terminal = sys.stdin.isatty()
    with saved.load_one().chat() as conversation:
        while True:
            try:
                question = input("> " if terminal else "")
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            except UnicodeDecodeError as error:
                raise PromptError(f"The input is not UTF-8 text: {error}.") from error
            if not question.strip():
                continue
            try:
                for piece in conversation.ask(question, max_new_tokens, stream=True):
                    typer.echo(piece, nl=False)
                typer.echo("\n")
            except KeyboardInterrupt:
                typer.echo("\n(stopped; this question and its answer are forgotten)", err=True)
            # A question that does not fit is skipped, and the conversation continues.
            except (CacheError, PromptError) as error:
                typer.echo(f"{error}", err=True)


def export(
    saved: Saved,
    store: Annotated[Path, Option(help="Folder where the engine looks for contexts.")],
    name: Annotated[str | None, Option(help="The context's name; default: the file's.")] = None,
    engine: Annotated[Literal["vllm"], Option(help="Engine that will serve it.")] = "vllm",
) -> None:
    """Put a saved cache where an inference engine finds it by name."""
    import gracekv.vllm
    from gracekv.vllm.header import HEADER, check_name

    path = store / check_name(name or saved.cache.stem)
    check_output(store / HEADER)  # refused before the model is loaded
    made = gracekv.vllm.export(saved.load(), path)
    for folder in made if isinstance(made, list) else [made]:
        typer.echo(f"{folder}")


def register(app: typer.Typer) -> None:
    """Add the four commands to the console application."""
    for command in (generate, ask, chat, export):
        app.command()(with_shared_options(command))
