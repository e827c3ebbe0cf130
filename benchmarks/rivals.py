"""What does each recipe cost to build? Prints a table and writes `benchmarks/results/rivals.md`.

SmolLM2, captured once per recipe for what that recipe needs. Peak memory is the kernel's: the
high-water mark of resident memory, reset before every construction (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from gracekv import Budget, Pipeline, Prefill, Prompt, recipes
from gracekv.hf.capture import capture
from gracekv.hf.smollm2 import load_smollm2
from gracekv.pipeline.run import Run

PREFIX, SUFFIX = 16, 48
STAGES = ("segment", "value", "tree", "allocate", "pack")
AFTER_PREFILL = ("surprisal", "projections", "query_sums", "reconstruction", "draft")
# Rare enough that the best of two costs little, common enough that one slow call does not decide.
REPEATS = 2
MIB = 2**20


def prompt_of(tokenizer: Any, length: int) -> Prompt:
    text = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    ids = (ids * (length // len(ids) + 1))[:length]
    return Prompt.from_ids(ids, context=(PREFIX, length - SUFFIX), question_end=length - 8)


def tensors(owner: object) -> Iterator[torch.Tensor]:
    """All tensors among an object's fields, in tuples and mappings too."""
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (x for x in value if isinstance(x, torch.Tensor))
        elif isinstance(value, dict):
            yield from (x for x in value.values() if isinstance(x, torch.Tensor))


class Peak:
    """Resident memory of this process: now, and at its highest since `reset`."""

    def reset(self) -> None:
        gc.collect()
        # Freed memory that the allocator kept would otherwise count as used before the call.
        ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise SystemExit(
                f"Peak memory is read from Linux's /proc; it refused: {error}"
            ) from error
        self.before = self._kib("VmRSS")

    def mib(self) -> float:
        return (self._kib("VmHWM") - self.before) / 1024

    def _kib(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found is None:
            raise SystemExit(f"/proc/self/status has no {name}; peak memory needs Linux.")
        return int(found[1])


def best(pipeline: Pipeline, prefill: Prefill, budget: Budget) -> tuple[Run, float]:
    """The fastest of some runs, and the peak MiB of the first."""
    peak = Peak()
    peak.reset()
    run = pipeline.run(prefill, budget)
    memory = peak.mib()
    for _ in range(REPEATS - 1):
        other = pipeline.run(prefill, budget)
        run = min(run, other, key=lambda run: run.timings.construction)
    return run, memory


def row_of(name: str, pipeline: Pipeline, model: Any, prompt: Prompt, budget: Budget) -> list[str]:
    prefill = capture(model, prompt, pipeline.needs())
    captured = sum(x.numel() * x.element_size() for x in tensors(prefill)) / MIB
    run, memory = best(pipeline, prefill, budget)
    seconds = run.timings.as_dict()
    return [
        name,
        f"{run.accounting.spent:,}",
        *(f"{seconds[stage]:.2f}" for stage in STAGES),
        f"{sum(seconds[stage] for stage in AFTER_PREFILL):.2f}",
        f"{run.timings.construction:.2f}",
        f"{100 * run.timings.construction / seconds['prefill']:.0f}%",
        f"{captured:.0f}",
        f"{memory:.0f}",
        f"{(run.accounting.bytes + run.accounting.metadata_bytes) / MIB:.0f}",
    ]


COLUMNS = (
    "recipe", "entries", *(f"{stage} s" for stage in STAGES), "capture's extra s",
    "construction s", "of prefill", "captured MiB", "peak MiB", "cache MiB",
)  # fmt: skip


def header(length: int, ratio: str, prefill: Prefill) -> list[str]:
    changes = [f"{name}: {dict(recipe.pipeline)}" for name, recipe in recipes.RECIPES.items()]
    return [
        f"machine: {machine.threads()}; {machine.versions()}",
        f"commit: {machine.commit()}",
        f"model: SmolLM2-135M-Instruct, {str(prefill.keys[0].dtype)[6:]}; {length:,} prompt tokens "
        f"(prefix {PREFIX}, suffix {SUFFIX}); ratio {ratio}; prefill "
        f"{prefill.seconds['prefill']:.1f} s; captured once per recipe",
        f"config: {Pipeline.named('gracekv')!r}",
        f"recipes, as changes to it: {'; '.join(changes)}",
        f"Seconds are the faster of {REPEATS} constructions. Construction is the stages and what "
        "the capture adds to the prefill for the recipe (surprisal, projections, a second pass), "
        "which is measured once.",
        "Captured: tensors of the prefill that the recipe reads, keys and values included. Peak: "
        "resident memory on top of that at its highest during the first construction (VmHWM after "
        "writing 5 to /proc/self/clear_refs, minus VmRSS before; freed memory is returned first), "
        "packed cache included. Cache: packed keys, values and metadata.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--ratio", default="8", help="how many times fewer context entries")
    parser.add_argument("--recipes", nargs="+", default=recipes.names(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rivals.md")
    args = parser.parse_args()
    pipelines = {name: Pipeline.named(name) for name in args.recipes}
    model, tokenizer = load_smollm2()
    prompt = prompt_of(tokenizer, args.length)
    prefill = capture(model, prompt)
    budget = Budget.ratio(args.ratio)
    lines = header(args.length, args.ratio, prefill)
    del prefill
    body = [row_of(name, pipe, model, prompt, budget) for name, pipe in pipelines.items()]
    table = Table(title="Recipes")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for row in body:
        table.add_row(*row)
    Console(width=180).print(table)
    args.out.parent.mkdir(exist_ok=True)
    text = ["# What each recipe costs to build", "", *(f"- {line}" for line in lines), ""]
    text += [f"| {' | '.join(COLUMNS)} |", f"|---|{'--:|' * (len(COLUMNS) - 1)}"]
    text += [f"| {' | '.join(row)} |" for row in body]
    args.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
