"""How long does compression take beside the prefill, and what does it need in memory?

    python benchmarks/construction.py                                    # SmolLM2 on the CPU
    python benchmarks/construction.py --device cuda --geometry qwen2.5-7b  # synthetic, no weights

Prints tables and writes `benchmarks/results/construction-<device>.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from gracekv import Budget, Pipeline, Prefill, Prompt
from gracekv.allocate import GreedyHeap
from gracekv.gemm import linear
from gracekv.prefill import PromptSpans, depth_layers
from gracekv.rope import Rope
from gracekv.tree import Nodes
from gracekv.tree.compiled import CompiledJudge
from gracekv.tree.prototype import PrototypeJudge

STAGES = ("surprisal", "projections", "segment", "value", "tree", "allocate", "pack")
PREFIX, SUFFIX = 16, 48
MIB = 2**20


@dataclass(frozen=True)
class Geometry:
    """Shapes of a model."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    width: int


GEOMETRIES = {
    "qwen2.5-7b": Geometry(28, 28, 4, 128, 3584),
    "smollm2": Geometry(30, 9, 3, 64, 576),
    "tiny": Geometry(2, 4, 2, 16, 32),
}


def synthetic(shape: Geometry, length: int, device: str, dtype: torch.dtype) -> Prefill:
    """A prefill whose hidden states wander between topics; K, V and Q are projections of them."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=device)

    # Real texts have slots of some 30 tokens: topics last as long on average.
    turns = torch.rand(length, generator=rng, device=device) < 1 / 30
    topic = turns.cumsum(0) % 64
    hidden = 2.0 * normal(64, shape.width)[topic] + normal(length, shape.width)
    normed = (hidden / hidden.square().mean(-1, keepdim=True).sqrt()).to(dtype)
    rope = Rope.of_theta(length, shape.dim, 1e6, torch.device(device))
    at = torch.arange(length, device=device)

    def project(heads: int, rotates: bool) -> torch.Tensor:
        weight = (normal(shape.width, heads * shape.dim) / shape.width**0.5).to(dtype)
        flat = (normed @ weight).view(length, heads, shape.dim).transpose(0, 1)
        if not rotates:
            return flat.contiguous()
        # Head by head: a float32 copy of all queries would be larger than all that is kept.
        return torch.stack([rope.rotate(x.float(), at).to(dtype) for x in flat])

    spans = PromptSpans(PREFIX, length - SUFFIX, length - 8, length)
    probes = len(spans.question_probes())
    layers = range(shape.layers)
    return Prefill(
        spans=spans,
        keys=tuple(project(shape.kv_heads, True) for _ in layers),
        values=tuple(project(shape.kv_heads, False) for _ in layers),
        queries=tuple(project(shape.heads, True) for _ in layers),
        query_positions=torch.arange(length),
        rope=rope,
        scale=shape.dim**-0.5,
        hidden={
            layer: hidden.to(dtype) for layer in depth_layers([0.33, 0.5, 0.67, 0.75], shape.layers)
        },
        surprisal=normal(length).abs(),
        head_outputs=normal(shape.layers, shape.heads, probes, shape.dim).to(dtype),
        projected_norms=normal(shape.layers, shape.kv_heads, probes).abs() + 0.1,
        projection_norms=normal(shape.layers, shape.heads).abs() + 0.1,
        token_ids=torch.arange(length),
    )


class Resident:
    """Resident memory of this process, MiB: now, and at its highest since the last `reset`."""

    def reset(self) -> float:
        gc.collect()
        # Freed memory that the allocator kept would otherwise count as used before the call.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._mib("VmRSS")

    def peak(self) -> float:
        return self._mib("VmHWM")

    def _mib(self, name: str) -> float:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None, "peak memory is read from Linux's /proc"
        return int(found[1]) / 1024


def prompt_of(tokenizer: Any, length: int) -> Prompt:
    text = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    ids = (ids * (length // len(ids) + 1))[:length]
    return Prompt.from_ids(ids, context=(PREFIX, length - SUFFIX), question_end=length - 8)


def differing(pipeline: Pipeline, prefill: Prefill, budget: Budget) -> int:
    """Nodes that the reference allocator, the priority queue, keeps and the fast one does not."""
    fast = pipeline.run(prefill, budget).frontier
    queue = dataclasses.replace(pipeline, allocate=GreedyHeap()).run(prefill, budget).frontier
    assert fast is not None
    assert queue is not None
    sets = []
    for frontier in (fast, queue):
        forest, kept = frontier.forest, frontier.kept
        columns = (forest.tree[kept], forest.start[kept], forest.end[kept])
        sets.append(set(zip(*(column.tolist() for column in columns), strict=True)))
    return len(sets[1] - sets[0])


@dataclass
class Judged:
    """What the trees' distortion was asked for: multiply-adds that no way of asking can avoid."""

    tokens: int = 0
    products: float = 0.0

    @contextmanager
    def counting(self, probes: int, dim: int) -> Iterator[None]:
        """Count what every judge is asked meanwhile."""
        kinds = [CompiledJudge, PrototypeJudge]
        before = [kind.__call__ for kind in kinds]

        def wrap(call: Any) -> Any:
            def counted(judge: Any, nodes: Nodes) -> Any:
                n = nodes.length.double()
                self.tokens += int(n.sum())
                # Both directions: logits of prototypes, cross terms of M, M.v~; and the Gram.
                pairs = 2 * n * probes * dim + 2 * n * n * probes + n * n * dim / 2
                self.products += float(pairs.sum())
                return call(judge, nodes)

            return counted

        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = wrap(call)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, call in zip(kinds, before, strict=True):
                kind.__call__ = call  # type: ignore[method-assign]


def products_per_second(device: str) -> float:
    """Multiply-adds of a large float32 matrix product, the best of five."""
    x, w = (torch.randn(n, 1024, device=device) for n in (2048, 8192))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        linear(x, w)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(2048 * 8192 * 1024 / min(times[1:]))


def operations(pipeline: Pipeline, prefill: Prefill, budget: Budget, device: str) -> str:
    """Which torch operation takes what, as text."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as recorded:
        pipeline.run(prefill, budget)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=40)
    return "\n".join(line.rstrip() for line in table.splitlines())


def memory_of(length: int, args: argparse.Namespace) -> tuple[float, float]:
    """`measured_memory` in a process of its own: a heap that other lengths left in pieces grows."""
    call = [sys.executable, __file__, "--memory", str(length), "--ratio", args.ratio]
    done = subprocess.run(
        [*call, "--engine", args.engine], capture_output=True, text=True, check=True
    )
    captured, extra = done.stdout.split()[-2:]
    return float(captured), float(extra)


def measured_memory(length: int, ratio: str, pipeline: Pipeline) -> tuple[float, float]:
    """Peak MiB of model and capture, and how much higher the construction goes."""
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.prefill.capture import capture

    resident = Resident()
    # Compiled kernels and libraries are loaded once, whatever the prompt.
    pipeline.run(synthetic(GEOMETRIES["tiny"], 256, "cpu", torch.float32), Budget.ratio(4))
    baseline = resident.reset()
    model, tokenizer = load_smollm2()
    capture(model, prompt_of(tokenizer, 256), pipeline.needs())
    resident.reset()
    prefill = capture(model, prompt_of(tokenizer, length), pipeline.needs())
    captured = resident.peak() - baseline
    before = resident.reset()
    pipeline.run(prefill, Budget.ratio(ratio))
    return captured, resident.peak() - before


def on_cpu(args: argparse.Namespace, pipeline: Pipeline) -> Iterator[tuple[int, list[str], str]]:
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.prefill.capture import capture

    model, tokenizer = load_smollm2()
    for length in args.lengths:
        prompt, budget = prompt_of(tokenizer, length), Budget.ratio(args.ratio)
        captured, extra = memory_of(length, args)
        prefill = capture(model, prompt, pipeline.needs())
        wrong = differing(pipeline, prefill, budget)
        detail = operations(pipeline, prefill, budget, "cpu")
        judged, probes = Judged(), 64
        with judged.counting(probes, prefill.head_dim):
            pipeline.run(prefill, budget)
        rate = products_per_second("cpu")
        head = model.get_output_embeddings().weight
        floor = (judged.products + length * head.numel()) / rate
        rows: list[dict[str, float]] = []
        for _ in range(args.repeats):
            prefill = capture(model, prompt, pipeline.needs())
            run = pipeline.run(prefill, budget)
            timings = run.timings
            rows.append(
                dict(timings.as_dict())
                | {"sum": timings.construction, "share": timings.construction / timings.prefill}
            )
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        assert run.partition is not None
        assert run.forest is not None
        yield (
            length,
            [
                f"{length:,}",
                f"{middle['prefill']:.2f}",
                *(f"{middle[stage]:.3f}" for stage in STAGES),
                f"{middle['sum']:.2f}",
                f"{middle['share']:.2f}",
                f"{run.partition.slots}",
                f"{run.forest.nodes:,}",
                f"{captured:,.0f}",
                f"{extra:,.0f}",
                f"{100 * extra / captured:.0f}%",
                f"{wrong}",
                f"{judged.tokens:,}",
                f"{floor:.2f}",
            ],
            detail,
        )


def on_gpu(args: argparse.Namespace, pipeline: Pipeline) -> Iterator[tuple[int, list[str], str]]:
    device = torch.device(args.device)
    measured = device.type == "cuda"
    for length in args.lengths:
        prefill = synthetic(GEOMETRIES[args.geometry], length, args.device, torch.bfloat16)
        budget = Budget.ratio(args.ratio)
        run = pipeline.run(prefill, budget)
        if measured:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if measured else 0
        rows = []
        for _ in range(args.repeats):
            run = pipeline.run(prefill, budget)
            rows.append(dict(run.timings.as_dict()) | {"sum": run.timings.construction})
        peak = torch.cuda.max_memory_allocated() if measured else 0
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        detail = operations(pipeline, prefill, budget, device.type)
        judged = Judged()
        with judged.counting(64, prefill.head_dim):
            pipeline.run(prefill, budget)
        floor = judged.products / products_per_second(device.type)
        assert run.partition is not None
        assert run.forest is not None
        yield (
            length,
            [
                f"{length:,}",
                "-",
                *(f"{middle[stage]:.3f}" for stage in STAGES),
                f"{middle['sum']:.3f}",
                "-",
                f"{run.partition.slots}",
                f"{run.forest.nodes:,}",
                f"{before / MIB:,.0f}",
                f"{(peak - before) / MIB:,.0f}",
                f"{100 * (peak - before) / max(before, 1):.0f}%",
                "-",
                f"{judged.tokens:,}",
                f"{floor:.3f}",
            ],
            detail,
        )
        del prefill, run


COLUMNS = (
    "tokens", "prefill s", *(f"{stage} s" for stage in STAGES), "construction s", "of prefill",
    "slots", "nodes", "prefill peak MiB", "extra MiB", "extra", "differ", "tokens judged",
    "floor s",
)  # fmt: skip


def header(args: argparse.Namespace, pipeline: Pipeline) -> list[str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cuda = args.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    what = (
        f"synthetic {args.geometry}, bfloat16"
        if args.geometry
        else "SmolLM2-135M-Instruct, float32, a book chapter repeated to length"
    )
    return [
        f"machine: {platform.machine()}, {os.cpu_count()} cores, {machine}; torch "
        f"{torch.__version__}, Python {platform.python_version()}",
        f"commit: {commit}",
        f"model: {what}; ratio {args.ratio}; medians of {args.repeats} runs",
        f"config: {pipeline!r}",
        "Construction is everything that compression adds to a prefill that makes one position's "
        "logits: surprisal (all positions' logits) and projections are the capture's, the rest "
        "the pipeline's stages.",
        "Prefill peak: model, prefill and all that is captured for this pipeline, at the highest "
        "(resident memory without what Python and its libraries took before; on a GPU allocated "
        "memory, without a model), in a process of its own. Extra: how much higher construction "
        "goes, the packed cache included. Differ: kept nodes of the reference allocator that the "
        "fast one did not keep.",
        "Floor: the multiply-adds of the logits (on a CPU) and of the tokens judged by the trees' "
        "distortion, at the speed of a large float32 product measured in the same run.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), help="synthetic captures")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--ratio", default="8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="engine of the trees' distortion")
    parser.add_argument("--memory", type=int, help="print peak MiB at this length, nothing else")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and args.geometry is None:
        args.geometry = "qwen2.5-7b"
    if args.lengths is None:
        args.lengths = [8192, 32768, 131072] if args.geometry else [1024, 2048, 4096, 8192]
    distortion = {"name": "prototype", "engine": args.engine}
    pipeline = Pipeline.from_dict({"distortion": distortion})
    if args.memory is not None:
        print(*measured_memory(args.memory, args.ratio, pipeline))
        return
    measure = on_gpu if args.geometry else on_cpu
    body, details = [], []
    for length, row, detail in measure(args, pipeline):
        body.append(row)
        details.append((length, detail))
        print(f"{length:,} tokens done", flush=True)
    table = Table(title="Construction")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in body:
        table.add_row(*row)
    Console(width=200).print(table)
    out = args.out or Path(__file__).parent / "results" / f"construction-{args.device}.md"
    out.parent.mkdir(exist_ok=True)
    text = ["# Construction", "", *(f"- {line}" for line in header(args, pipeline)), ""]
    text += [f"| {' | '.join(COLUMNS)} |", f"|{'--:|' * len(COLUMNS)}"]
    text += [f"| {' | '.join(row)} |" for row in body]
    for length, detail in details[-2:]:
        text += ["", f"## Operations at {length:,} tokens", "", "```", detail, "```"]
    out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
