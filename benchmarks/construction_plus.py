"""The time of a compression over that of a plain prefill, recipe by recipe.

    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py
    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py --recipes all --out all.md
    python benchmarks/construction_plus.py --device cuda --geometry qwen2.5-7b --out gpu.md

`gracekv.compress` as one calls it, which reads layer by layer where the recipe allows it, against a
forward pass with a stock cache and the last logits. They take turns, and medians of the rounds
count; passes that are not counted go before both. On a CPU times are CPU seconds of the process, so
that other work on the machine distorts the ratio less than it does wall time; with more than one
thread they include threads that wait. On a GPU they are wall seconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from construction_inputs import prompt_of
from decode_shapes import GEOMETRIES, model_of

import gracekv
from gracekv import Prompt
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2
from gracekv.recipes import names

PAGE = Path(__file__).parent / "results" / "construction-plus.md"
RECIPES = (
    "gracekv-plus",
    "gracekv-agnostic",
    "gracekv-agnostic-allocated",
    "gracekv-plus-no-fit",
    "snapkv",
)


def seconds(work: Callable[[], object], device: str) -> float:
    """CPU seconds of the process, or wall seconds until the GPU is done."""
    gc.collect()
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rows(model: Any, prompt: Prompt, args: argparse.Namespace) -> list[str]:
    """A line for each recipe."""
    ids = prompt.ids[None].to(args.device)

    @torch.no_grad()
    def plain() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def compress(name: str) -> None:
        gracekv.compress(model, prompt, ratio=args.ratio, pipeline=name)

    taken: dict[str, list[float]] = {name: [] for name in args.recipes}
    base = []
    for number in range(args.rounds):
        # Compressing has given memory back, which the first pass after it has to get again.
        plain()
        base.append(seconds(plain, args.device))
        for name, found in taken.items():
            if args.device == "cuda" and number == 0:
                compress(name)  # compiles kernels of these shapes
            found.append(seconds(partial(compress, name), args.device))
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
    parser.add_argument("--geometry", default="smollm2", choices=list(GEOMETRIES))
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
