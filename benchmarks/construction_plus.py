"""What compressing adds to a plain prefill, recipe by recipe: `results/construction-plus.md`.

    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py

`gracekv.compress` as one calls it, which reads layer by layer where the recipe allows it, against a
forward pass with a stock cache and the last logits. They take turns, and medians of the rounds
count; a pass that is not counted goes before each plain one. Times are CPU seconds of the process,
so that other work on the machine distorts the ratio less than it does wall time; with more than one
thread they include threads that wait.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from construction_inputs import prompt_of

import gracekv
from gracekv import Prompt
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "construction-plus.md"
RECIPES = (
    "gracekv-plus",
    "gracekv-agnostic",
    "gracekv-agnostic-allocated",
    "gracekv-plus-no-fit",
    "snapkv",
)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the process."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def rows(model: Any, prompt: Prompt, args: argparse.Namespace) -> list[str]:
    """A line for each recipe."""
    ids = prompt.ids[None]

    @torch.no_grad()
    def plain() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    taken: dict[str, list[float]] = {name: [] for name in args.recipes}
    base = []
    for _ in range(args.rounds):
        # Compressing has given memory back, which the first pass after it has to get again.
        plain()
        base.append(seconds(plain))
        for name, found in taken.items():
            found.append(
                seconds(
                    lambda name=name: gracekv.compress(
                        model, prompt, ratio=args.ratio, pipeline=name
                    )
                )
            )
    prefill = statistics.median(base)
    lines = []
    for name, found in taken.items():
        middle = statistics.median(found)
        more = middle - prefill
        lines.append(
            f"| {len(prompt.ids):,} | `{name}` | {prefill:.2f} | {middle:.2f} | {more:.2f} | "
            f"{more / prefill:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=8)
    args = parser.parse_args()
    model, tokenizer = load_smollm2()
    for name in args.recipes:  # loads compiled kernels
        gracekv.compress(model, prompt_of(tokenizer, 256), ratio=args.ratio, pipeline=name)
    table = []
    for length in args.lengths:
        table += rows(model, prompt_of(tokenizer, length), args)
        print("\n".join(table[-len(args.recipes) :]), flush=True)
    head = f"""# What compressing adds to the prefill

- machine: {machine.cpu()}, {machine.threads()}; {machine.versions()}
- commit: {machine.commit()}
- model: SmolLM2-135M-Instruct, float32, a book chapter repeated to length; ratio {args.ratio:g}
- CPU seconds of the process, medians of {args.rounds} rounds that take all rows of a length in \
turn. Prefill: a forward pass with a stock cache and the last logits, after another one. Compress: \
all of `gracekv.compress`, its prefill included, layer by layer.

| tokens | recipe | prefill | compress | more | of prefill |
|--:|---|--:|--:|--:|--:|
"""
    write_atomically(PAGE, (head + "\n".join(table) + "\n").encode())


if __name__ == "__main__":
    main()
