"""What the hand-written matrix product and exponential of the compiled kernels bring.

    python benchmarks/numba_kernels.py

Each row compiles the kernel of the trees' distortion with one part replaced: the product by loops
that the compiler vectorises or by BLAS (scipy's sgemm, called from compiled code), the exponential
by libm's. Prints a table and writes `benchmarks/results/numba_kernels.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from construction_inputs import GEOMETRIES, synthetic
from numba import carray, njit
from numba.extending import get_cython_function_address

from gracekv import Pipeline
from gracekv.kernels.intrinsics import pointer
from gracekv.tree import TreeContext, build_forest
from gracekv.tree.engines import numba_interval_costs

VARIANTS = ("ours", "product: loops", "product: BLAS", "exponential: libm")


@njit(nogil=True, fastmath={"contract"})
def loops(
    a: int, lda: int, rows: int, b: int, ldb: int, c: int, ldc: int, first: int, stop: int,
    columns: int,
) -> None:  # fmt: skip
    """`numba_matmul.multiply` in loops that the compiler vectorises."""
    x = carray(pointer(a), (rows, lda), np.float32)
    y = carray(pointer(b), (stop, ldb), np.float32)
    z = carray(pointer(c), (rows, ldc), np.float32)
    for r in range(rows):
        for i in range(columns):
            z[r, i] = np.float32(0)
        for s in range(first, stop):
            factor = x[r, s]
            for i in range(columns):
                z[r, i] += factor * y[s, i]


def blas() -> Callable[..., None]:
    """`numba_matmul.multiply` by BLAS."""
    import ctypes

    address = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 13)(address)

    @njit(nogil=True)
    def multiply(
        a: int, lda: int, rows: int, b: int, ldb: int, c: int, ldc: int, first: int, stop: int,
        columns: int,
    ) -> None:  # fmt: skip
        n = np.empty(6, np.int32)
        n[0], n[1], n[2], n[3], n[4], n[5] = columns, rows, stop - first, ldb, lda, ldc
        scale = np.array([1.0, 0.0], np.float32)
        plain = np.array([ord("N")], np.uint8).ctypes.data
        # BLAS counts by columns: the transposed product of the transposed factors.
        sgemm(
            plain, plain, n.ctypes.data, n.ctypes.data + 4, n.ctypes.data + 8, scale.ctypes.data,
            b + 4 * first * ldb, n.ctypes.data + 12, a + 4 * first, n.ctypes.data + 16,
            scale.ctypes.data + 4, c, n.ctypes.data + 20,
        )  # fmt: skip

    return multiply  # type: ignore[no-any-return]


@njit(nogil=True)
def libm(x: Any, bits: Any, power: Any) -> None:
    """`exponential.exponentiate` by the mathematical library."""
    for q in range(len(x)):
        x[q] = np.float32(math.exp(x[q]))


def cpu_time(call: Callable[[], object], repeats: int) -> float:
    """The best CPU time in milliseconds, after a first call that compiles."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return min(times)


def measure(variant: str, repeats: int) -> list[float]:
    """Trees of 1,024 and 4,096 tokens, in ms."""
    if variant == "product: loops":
        numba_interval_costs.multiply = loops
    if variant == "product: BLAS":
        numba_interval_costs.multiply = blas()
    if variant == "exponential: libm":
        numba_interval_costs.exponentiate = libm
    times = []
    for length in (1024, 4096):
        prefill = synthetic(GEOMETRIES["smollm2"], length, "cpu", torch.float32)
        pipeline = Pipeline.named("gracekv")
        region = prefill.spans.region(32)
        partition = pipeline.segment(prefill, region)
        relevance = pipeline.value(prefill, region)
        context = TreeContext(
            prefill=prefill,
            partition=partition,
            scores=relevance.scores,
            seed_scores=relevance.seed_scores,
            sensitivity=pipeline.sensitivity(prefill),
            rule=pipeline.prototype,
            curvature=partition.curvature,
        )
        budget = prefill.layers * prefill.kv_heads * length // 8
        call = partial(build_forest, context, pipeline.distortion, pipeline.refine, budget)
        times.append(cpu_time(call, repeats))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.variant:
        print(json.dumps(measure(args.variant, args.repeats)))
        return
    columns = ("kernels", "trees, 1,024 tokens", "trees, 4,096 tokens")
    lines = [f"| {' | '.join(columns)} |", "|---|--:|--:|"]
    for variant in VARIANTS:
        # numba's disk cache does not see that a part was replaced.
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, __file__, "--variant", variant, "--repeats", str(args.repeats)],
                env=os.environ | {"NUMBA_CACHE_DIR": cache},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        times = json.loads(done.stdout.splitlines()[-1])
        lines.append(f"| {variant} | {' | '.join(f'{x:.0f} ms' for x in times)} |")
        print(lines[-1], flush=True)
    head = [
        "# Hand-written parts of the compiled kernels",
        "",
        f"- machine: {machine.cpu()}, 1 thread; torch {torch.__version__}",
        f"- commit: {machine.commit()}; float32; CPU time, best of {args.repeats} runs",
        "- `python benchmarks/numba_kernels.py`; trees of a synthetic SmolLM2 prefill, ratio 8",
        "",
    ]
    out = Path(__file__).parent / "results" / "numba_kernels.md"
    out.write_text("\n".join(head + lines) + "\n")
    print("\n".join(head + lines))


if __name__ == "__main__":
    main()
