"""The time of a compression relative to a plain prefill, recipe by recipe.

    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py
    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py --recipes all --out all.md
    python benchmarks/construction_plus.py --device cuda --geometry qwen2.5-7b --out cuda.md

`gracekv.compress` as users call it, layer by layer where the recipe allows it, against a forward
pass with a stock cache and the last logits. They take turns, and medians of the rounds are
reported; each round begins with a plain pass that is not counted. On a CPU, times are CPU seconds
of the process, which other work on the machine distorts less than wall time; with more than one
thread they include waiting threads. On a GPU they are wall seconds.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from construction_inputs import prompt_of
from decode_shapes import GEOMETRIES, model_of
from torch import Tensor

import gracekv
from gracekv import Prompt
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2
from gracekv.recipes import names

PAGE = Path(__file__).parent / "results" / "construction-plus.md"
PREFILL = "prefill"
RECIPES = (
    "gracekv-plus",
    "gracekv-agnostic",
    "gracekv-agnostic-allocated",
    "gracekv-plus-no-fit",
    "snapkv",
)


def measured(work: Callable[[], object], device: str) -> tuple[float, float]:
    """CPU seconds and 0, or, on a GPU, wall seconds until it is done and peak GiB."""
    gc.collect()
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30


def against_prefill(
    model: Any,
    ids: Tensor,
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    patience: float = math.inf,
) -> dict[str, tuple[float, float]]:
    """Median seconds and highest peak of each of `works`, and of a plain "prefill" of `ids`.

    They take turns. Anything they compile must be compiled before.

    Args:
        model: prefills.
        ids: ids of the prompt; [1, tokens].
        works: by name.
        rounds: at most.
        patience: seconds after which no further round begins.
    """

    @torch.no_grad()
    def plain() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    device = ids.device.type
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in (PREFILL, *works)}
    begin = time.monotonic()
    for _ in range(rounds):
        # Compressing has freed memory, which the first pass after it must allocate again.
        plain()
        taken[PREFILL].append(measured(plain, device))
        for name, work in works.items():
            taken[name].append(measured(work, device))
        if time.monotonic() - begin > patience:
            break
    return {
        name: (statistics.median(seconds for seconds, _ in found), max(peak for _, peak in found))
        for name, found in taken.items()
    }


def rows(model: Any, prompt: Prompt, args: argparse.Namespace) -> list[str]:
    """One line per recipe."""

    def compress(name: str) -> None:
        gracekv.compress(model, prompt, ratio=args.ratio, pipeline=name)

    works = {name: partial(compress, name) for name in args.recipes}
    if args.device == "cuda":  # compiles kernels of these shapes
        for work in works.values():
            work()
    taken = against_prefill(model, prompt.ids[None].to(args.device), works, args.rounds)
    prefill, lines = taken.pop(PREFILL)[0], []
    for name, (middle, _) in taken.items():
        more = middle - prefill
        lines.append(
            f"| {len(prompt.ids):,} | `{name}` | {prefill:.2f} | {middle:.2f} | {more:.2f} | "
            f"{more / prefill:.2f} |"
        )
    return lines


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help='"all": every recipe'
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    known = [name for name in GEOMETRIES if name != "tiny"]  # has too few token ids
    parser.add_argument("--geometry", default="smollm2", choices=known)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.recipes == ["all"]:
        args.recipes = list(names())
    return args


def main() -> None:
    args = parsed()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    # Models with random weights read the same text.
    model, tokenizer = model_of(GEOMETRIES[args.geometry], dtype, args.device), load_smollm2()[1]
    for name in args.recipes:  # loads compiled kernels
        gracekv.compress(model, prompt_of(tokenizer, 512), ratio=args.ratio, pipeline=name)
    table = []
    for length in args.lengths:
        table += rows(model, prompt_of(tokenizer, length), args)
        print("\n".join(table[-len(args.recipes) :]), flush=True)
    kind = "CPU seconds of the process" if args.device == "cpu" else "Wall seconds"
    on = machine.threads() if args.device == "cpu" else torch.cuda.get_device_name()
    weights = "SmolLM2-135M-Instruct" if args.geometry == "smollm2" else f"{args.geometry}, random"
    every = ", every recipe" if len(args.recipes) == len(names()) else ""
    head = f"""# What compressing adds to the prefill{every}

- machine: {machine.cpu()}, {on}; {machine.versions()}
- commit: {machine.commit()}
- model: {weights}, {str(dtype)[6:]}, a book chapter repeated to length; ratio {args.ratio:g}
- {kind}, medians of {args.rounds} rounds that take all rows of a length in turn. Prefill: a \
forward pass with a stock cache and the last logits, after another one. Compress: all of \
`gracekv.compress`, its prefill included, layer by layer where the recipe allows it.

| tokens | recipe | prefill | compress | more | of prefill |
|--:|---|--:|--:|--:|--:|
"""
    write_atomically(args.out, (head + "\n".join(table) + "\n").encode())


if __name__ == "__main__":
    main()
