"""Construction of the default recipe against the prefill, on SmolLM2 and a CPU.

    OMP_NUM_THREADS=1 python benchmarks/construction_plus.py --lengths 1000 2000 4000

Prefill and construction alternate; medians. Times are CPU seconds of the process, so that other
work on the machine distorts the ratio less than it does wall time; with more than one thread they
include threads that wait. Writes `benchmarks/results/construction-plus.md`, row by row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import machine
import torch
from construction_inputs import prompt_of

from gracekv import Budget, Pipeline
from gracekv.hf.capture import capture
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "construction-plus.md"
HEAD = """# Construction of gracekv-plus beside the prefill

{cpu}, {cores} cores, {threads} thread(s), torch {torch}, float32, commit {commit},
SmolLM2-135M, ratio {ratio}. CPU seconds of the process, medians of {repeats} alternating
runs. {note}

| tokens | prefill | construction | construction / prefill |
|--:|--:|--:|--:|
"""


def row(model: object, tokenizer: object, length: int, args: argparse.Namespace) -> str:
    pipeline = Pipeline.named("gracekv-plus")
    prompt, budget = prompt_of(tokenizer, length), Budget.ratio(args.ratio)
    found: list[tuple[float, float]] = []
    for _ in range(args.repeats + 1):
        clock = time.process_time()
        prefill = capture(model, prompt, pipeline.needs())
        captured = time.process_time()
        pipeline.run(prefill, budget)
        found.append((captured - clock, time.process_time() - captured))
    # The first run loads compiled kernels.
    alone, construction = (statistics.median(x) for x in zip(*found[1:], strict=True))
    share = statistics.median(built / captured for captured, built in found[1:])
    return f"| {length:,} | {alone:.2f} | {construction:.2f} | {share:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--note", default="", help="a sentence for the page's head")
    args = parser.parse_args()
    model, tokenizer = load_smollm2()
    page = HEAD.format(
        cpu=machine.cpu(), cores=os.cpu_count(), threads=torch.get_num_threads(),
        torch=torch.__version__, commit=machine.commit(), ratio=args.ratio, repeats=args.repeats,
        note=args.note,
    )  # fmt: skip
    for length in args.lengths:
        page += row(model, tokenizer, length, args) + "\n"
        PAGE.write_text(page, encoding="utf-8")
        print(page.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
