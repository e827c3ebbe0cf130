"""Time of the segmenter `curvature_dp` by part, on synthetic states.

    python benchmarks/segmentation.py
    python benchmarks/segmentation.py --device cuda --width 3584

Prints a table: the dynamic program in its two implementations, and what makes its input.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from gracekv.segment import CurvatureDP
from gracekv.segment.curvature_dp import dispersion_table
from gracekv.segment.partition_dp import best_partition


def best_of(call: Callable[[], object], device: str, repeats: int) -> str:
    """The best time in milliseconds, after a first call that compiles."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return f"{1000 * min(times):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--width", type=int, default=576, help="of the hidden states")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    segmenter = CurvatureDP()
    print("| tokens | curvature ms | dispersion ms | dynamic program ms |")
    print("|--:|--:|--:|--:|")
    for length in args.lengths:
        rng = torch.Generator(args.device).manual_seed(0)
        states = [
            torch.randn(length, args.width, generator=rng, device=args.device) for _ in range(3)
        ]
        boundary = torch.randn(length, generator=rng, device=args.device).double()
        profit = segmenter.slot_profits(boundary, states)
        calls = (
            lambda states=states: segmenter.curvature.of_states(states),
            lambda states=states: dispersion_table(states, segmenter.max_length, 1e-6),
            lambda profit=profit: best_partition(profit, segmenter.min_length),
        )
        times = [best_of(call, args.device, args.repeats) for call in calls]
        print(f"| {length:,} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
