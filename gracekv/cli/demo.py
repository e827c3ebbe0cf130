"""`gracekv demo`: one chapter, one question, the full cache against 4x, 8x and 16x."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gracekv
from gracekv import recipes
from gracekv.files import check_output
from gracekv.hf.smollm2 import load_smollm2
from gracekv.report import compare

if TYPE_CHECKING:
    from gracekv import CompressionResult

DOCUMENT = "alice_chapter_1.txt"
INSTRUCTION = "Read the story and answer the question."
QUESTION = "What are the words on the paper label of the little bottle? Quote them."
# An answer with these words counts as correct.
EXPECTED = "DRINK ME"
RATIOS = (4, 8, 16)
# Recipes and ratios to compare the default recipe with.
OTHERS = (("gracekv", 8), ("snapkv", 8))
_TIMED_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One compressed prompt of the demo and its answer.

    Attributes:
        label: the recipe's name and the ratio: "fullkv", "gracekv-plus 8x".
        result: the compressed prompt.
        answer: its greedy continuation.
        decode: seconds per decoded token.
    """

    label: str
    result: CompressionResult
    answer: str
    decode: float


def run_demo(out: Path, max_new_tokens: int = 32) -> None:
    """Load the embedded model, run every ratio, and print tables.

    Writes `out`/report.html, which shows what happened to every token.
    """
    page = out / "report.html"
    check_output(page)
    console = Console()
    trials = _trials(console, max_new_tokens)
    prompt = trials[0].result.prompt
    console.print(
        f"\n[bold]{QUESTION}[/bold]\n{len(prompt.ids):,} prompt tokens, of which "
        f"{prompt.spans.context_length:,} are the chapter. Answers are decoded greedily and shown "
        f"unedited; one is right if it contains “{EXPECTED}”."
    )
    for trial in trials:
        right = "right" if EXPECTED.lower() in trial.answer.lower() else "wrong"
        said = trial.answer.replace("\n", " ")
        console.print(f"{trial.label} ({right}): {said}", markup=False, highlight=False)
    console.print(_figures(trials))
    _, light, shown_first, hard, *others = trials
    shown = [shown_first, *others, light, hard]
    compare({t.label: t.result for t in shown}, page, answers={t.label: t.answer for t in shown})
    where = escape(str(page.resolve()))
    console.print(f"What happened to every token, by method: [bold]{where}[/bold]")


def _trials(console: Console, max_new_tokens: int) -> list[Trial]:
    trials = []
    with console.status("Loading the model (converted on first use)") as status:
        model, tokenizer = load_smollm2()
        document = (files("gracekv") / "data" / DOCUMENT).read_text(encoding="utf-8")
        texts: dict[str, Any] = {"question": QUESTION, "instruction": INSTRUCTION}
        read = (document, document[:2000])
        prompt, opening = (gracekv.Prompt.from_chat(tokenizer, context=x, **texts) for x in read)
        # The times below then exclude compilation.
        status.update("Compiling kernels (once per machine, half a minute)")
        gracekv.compress(model, opening, ratio=2, pipeline="gracekv")
        for recipe, ratio in (("fullkv", 1), *((recipes.DEFAULT, x) for x in RATIOS), *OTHERS):
            label = recipe if ratio == 1 else f"{recipe} {ratio}x"
            status.update(f"{label}: prefill, compression and answer")
            result = gracekv.compress(model, prompt, ratio=ratio, pipeline=recipe)
            # The answer also warms up, so that the timed run measures decoding alone.
            answer = result.generate(max_new_tokens=max_new_tokens)
            start = time.perf_counter()
            result.generate(max_new_tokens=_TIMED_TOKENS, min_new_tokens=_TIMED_TOKENS)
            decode = (time.perf_counter() - start) / _TIMED_TOKENS
            trials.append(Trial(label, result, answer.strip(), decode))
    return trials


def _figures(trials: Sequence[Trial]) -> Table:
    """A column per cache; six fit a terminal of 80 columns."""
    kept = [trial.result.accounting for trial in trials]
    timings = [trial.result.timings for trial in trials]
    rows = {
        "context entries": [f"{k.spent:,}" for k in kept],
        "K and V, MiB": [f"{k.bytes / 2**20:.1f}" for k in kept],
        "  of FullKV's": [f"{k.bytes / k.full_bytes:.1%}" for k in kept],
        "metadata, MiB": [f"{k.metadata_bytes / 2**20:.2f}" for k in kept],
        "prefill, s": [f"{t.prefill:.2f}" for t in timings],
        "compression, s": [f"{t.construction:.2f}" for t in timings],
        "ms per decoded token": [f"{trial.decode * 1000:.0f}" for trial in trials],
    }
    table = Table(title="Caches (physical tensors) and times", title_justify="left")
    table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, 0, False
    table.add_column("", no_wrap=True)
    for trial in trials:
        header = trial.label.replace(" ", "\n").replace("-", "-\n")
        table.add_column(header, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
