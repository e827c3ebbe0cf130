"""The parts of `gpu.py` that check whether everything works."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from construction_plus import measured
from gpu_bench import FLOAT32_ON_GPU, Bench
from gpu_report import Case, Row

import gracekv
from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.backends import AttentionSpec, Auto
from gracekv.hf import graph_replay
from gracekv.pipeline import Pipeline
from gracekv.prefill import Prefill
from gracekv.testing.attention import TOLERANCES, attention_problem, check_attention
from gracekv.testing.models import tiny_llama

_ROOT = Path(__file__).resolve().parents[1]
# Tests of kernels on a GPU.
CUDA_TESTS = (
    "tests/tree/test_triton_kernel_cuda.py",
    "tests/kernels/test_softmax_sums_cuda.py",
    "tests/backends/test_triton_cuda.py",
)
# Too many cases for one row: one row per dtype.
MANY_CASES = ("test_equals_dense_attention",)
# pytest's exit status if a whole file is skipped.
_NO_TESTS = 5


def kernels(bench: Bench) -> Iterator[Case]:
    """Ragged attention against float64, by head dimension and dtype, with and without a mask."""
    backend = Auto().resolve(AttentionSpec(torch.device(bench.options.device)))
    cases = [(64, dtype, "none") for dtype in TOLERANCES] + [(64, torch.bfloat16, "bool")]
    if not bench.options.tiny:
        cases += [(dim, torch.bfloat16, "none") for dim in (80, 128, 256)]
        cases += [(128, torch.float32, "none"), (128, torch.bfloat16, "bool")]
    for dim, dtype, mask in cases:

        def work(dim: int = dim, dtype: torch.dtype = dtype, mask: str = mask) -> Row:
            problem = attention_problem(
                dim, [300, 60, 0, 70], dim=dim, group=4, batch=2, tokens=2, tail=33, mask=mask,
                dtype=dtype, device=bench.options.device,
            )  # fmt: skip
            bound = FLOAT32_ON_GPU if bench.cuda and dtype == torch.float32 else None
            check_attention(backend, problem, bound=bound)
            return {}

        labels = {"backend": backend.name, "dim": dim, "dtype": str(dtype)[6:], "mask": mask}
        yield Case(labels, work, 5)


def same(bench: Bench) -> Iterator[Case]:
    """Whether each recipe keeps the same entries of one prefill on the CPU and on the device.

    Sums in another order may reorder scores that tie in float32, so single entries may differ;
    more than one in a hundred is a bug.
    """
    pipelines = {name: Pipeline.named(name) for name in recipes.names()}

    @functools.cache
    def prefills() -> tuple[Prefill, Prefill]:
        model = tiny_llama(layers=2, heads=4, kv_heads=2, dim=64)
        prompt = bench.prompt(120 if bench.options.tiny else 300, vocabulary=97)
        needs = functools.reduce(operator.or_, (own.needs() for own in pipelines.values()))
        prefill = gracekv.capture(model, prompt, needs)
        return prefill, moved(prefill, torch.device(bench.options.device))

    for name, pipeline in pipelines.items():

        def work(pipeline: Pipeline = pipeline) -> Row:
            kept = [
                {
                    (number, row, position)
                    for number, layer in enumerate(pipeline.run(own, Budget.ratio(4)).cache.layers)
                    for row in range(layer.heads)
                    for position in layer.head(row)[2].tolist()
                }
                for own in prefills()
            ]
            differ = len(kept[0] ^ kept[1]) / 2
            fine = differ <= 0.01 * len(kept[0])
            status = "ok" if fine else "failed: other entries"
            return {"entries": len(kept[0]), "differ": differ, "status": status}

        yield Case({"recipe": name}, work, 5)


def moved(prefill: Prefill, device: torch.device) -> Prefill:
    """The prefill with everything that depends on its length on `device`."""

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return {name: move(value) for name, value in x.items()} if isinstance(x, dict) else x

    names = ("keys", "values", "queries", "observed", "logits")
    return dataclasses.replace(prefill, **{name: move(getattr(prefill, name)) for name in names})


def replay(bench: Bench) -> Iterator[Case]:
    """`result.generate` with and without a recorded step: same tokens, and speed."""
    options = bench.options
    tokens = 20 if options.tiny else 192
    for length, rows in product(options.lengths[:1], options.batches[:2]):

        def work(length: int = length, rows: int = rows) -> Row:
            model = bench.model
            prompts = [bench.prompt(length - 7 * number) for number in range(rows)]
            result = gracekv.compress(model, prompts, ratio=options.ratio, pipeline="gracekv-plus")
            suits, found, answers = graph_replay.suits, {}, {}
            try:
                for name, replays in (("growing", False), ("replayed", True)):
                    graph_replay.suits = lambda *_, replays=replays: replays
                    result.generate_ids(20, eos_token_id=None)  # compiles the kernels

                    def generate(name: str = name) -> None:
                        answers[name] = result.generate_ids(tokens, eos_token_id=None)

                    seconds, _ = measured(generate, options.device)
                    found[f"{name} ms/token"] = 1e3 * seconds / tokens
            finally:
                graph_replay.suits = suits
            agreeing = (answers["growing"] == answers["replayed"]).float().mean()
            # Two answers may diverge after a tie in bfloat16.
            alike = (answers["growing"] == answers["replayed"])[:, 0].all()
            status = "ok" if bool(alike) else "failed: other first tokens"
            suited = suits(model, result.new_cache(), tokens, {})
            return {**found, "same tokens": float(agreeing), "default": suited, "status": status}

        yield Case({"prompt": length, "rows": rows}, work, 40)


def tests(bench: Bench) -> Iterator[Case]:
    """The tests that only a GPU can run, one row per function; a tiny run has one."""
    found = [
        (file, name, only)
        for file in CUDA_TESTS
        for name in re.findall(r"^def (test_\w+)", (_ROOT / file).read_text("utf-8"), re.MULTILINE)
        for only in (map(str, TOLERANCES) if name in MANY_CASES else ("",))
    ]
    # Tests that have failed or hung on a GPU come first, those with hundreds of cases last.
    found.sort(key=lambda row: (row[1] in MANY_CASES, "repeats" not in row[1]))
    for file, name, only in found[: 1 if bench.options.tiny else None]:

        def work(test: str = f"{file}::{name}", only: str = only) -> Row:
            missing = [x for x in ("pytest", "hypothesis") if not importlib.util.find_spec(x)]
            if missing:
                return {"status": f"left out: {' and '.join(missing)} not installed"}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
            done = subprocess.run(
                [*command, "-k", only], cwd=_ROOT, capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line]
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            status = "ok" if done.returncode in (0, _NO_TESTS) else "failed"
            return {"result": lines[-1], "failures": "; ".join(failed)[:400], "status": status}

        labels = {"file": Path(file).name, "test": name, "only": only}
        yield Case(labels, work, 150 if only else 40)
