"""Time of compression relative to the prefill, and its memory.

    python benchmarks/construction.py                                    # SmolLM2 on the CPU
    python benchmarks/construction.py --device cuda --geometry qwen2.5-7b  # synthetic, no weights

Prints tables and writes `benchmarks/results/construction-<device>.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from construction_floor import DistortionWork, multiply_adds_per_second
from construction_inputs import GEOMETRIES, prompt_of, synthetic
from construction_memory import measured_memory, memory_of
from construction_page import STAGES, show, write
from torch.profiler import ProfilerActivity, profile

from gracekv import Budget, Pipeline, Prefill
from gracekv.allocate.reference import greedy_heap

MIB = 2**20


def differing(pipeline: Pipeline, prefill: Prefill, budget: Budget) -> int:
    """Nodes that the auction's reference, a priority queue, keeps and the fast one does not.

    The reference runs over whole trees. 0 where single tokens are selected, without trees.
    """
    fast = pipeline.run(prefill, budget).frontier
    if fast is None:
        return 0
    whole = dataclasses.replace(pipeline, prune=False).run(prefill, budget).floor
    assert whole is not None
    queue = greedy_heap(whole, None)
    sets = []
    for frontier in (fast, queue):
        forest, kept = frontier.forest, frontier.kept
        columns = (forest.tree[kept], forest.start[kept], forest.end[kept])
        sets.append(set(zip(*(column.tolist() for column in columns), strict=True)))
    return len(sets[1] - sets[0])


def operations(pipeline: Pipeline, prefill: Prefill, budget: Budget, device: str) -> str:
    """The time of each torch operation, as text."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as recorded:
        pipeline.run(prefill, budget)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=40)
    return "\n".join(line.rstrip() for line in table.splitlines())


def on_cpu(args: argparse.Namespace, pipeline: Pipeline) -> Iterator[tuple[int, list[str], str]]:
    from gracekv.hf.capture import capture
    from gracekv.hf.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    for length in args.lengths:
        prompt, budget = prompt_of(tokenizer, length), Budget.ratio(args.ratio)
        captured, extra = memory_of(length, args)
        prefill = capture(model, prompt, pipeline.needs())
        different = differing(pipeline, prefill, budget)
        profiled = operations(pipeline, prefill, budget, "cpu")
        work = DistortionWork(prefill.head_dim)
        with work.counting():
            pipeline.run(prefill, budget)
        rate = multiply_adds_per_second("cpu")
        head = model.get_output_embeddings().weight
        floor = (work.multiply_adds + length * head.numel()) / rate
        rows: list[dict[str, float]] = []
        for _ in range(args.repeats):
            prefill = capture(model, prompt, pipeline.needs())
            run = pipeline.run(prefill, budget)
            timings = run.timings
            rows.append(
                dict(timings.as_dict())
                | {"sum": timings.construction, "share": timings.construction / timings.prefill}
            )
        median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        assert run.partition is not None
        nodes = 0 if run.forest is None else run.forest.nodes
        yield (
            length,
            [
                f"{length:,}",
                f"{median['prefill']:.2f}",
                *(f"{median[stage]:.3f}" for stage in STAGES),
                f"{median['sum']:.2f}",
                f"{median['share']:.2f}",
                f"{run.partition.slots}",
                f"{nodes:,}",
                f"{captured:,.0f}",
                f"{extra:,.0f}",
                f"{100 * extra / captured:.0f}%",
                f"{different}",
                f"{work.tokens:,}",
                f"{floor:.2f}",
            ],
            profiled,
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
        median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        profiled = operations(pipeline, prefill, budget, device.type)
        work = DistortionWork(prefill.head_dim)
        with work.counting():
            pipeline.run(prefill, budget)
        floor = work.multiply_adds / multiply_adds_per_second(device.type)
        assert run.partition is not None
        nodes = 0 if run.forest is None else run.forest.nodes
        yield (
            length,
            [
                f"{length:,}",
                "-",
                *(f"{median[stage]:.3f}" for stage in STAGES),
                f"{median['sum']:.3f}",
                "-",
                f"{run.partition.slots}",
                f"{nodes:,}",
                f"{before / MIB:,.0f}",
                f"{(peak - before) / MIB:,.0f}",
                f"{100 * (peak - before) / max(before, 1):.0f}%",
                "-",
                f"{work.tokens:,}",
                f"{floor:.3f}",
            ],
            profiled,
        )
        del prefill, run


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
    body, profiles = [], {}
    for length, row, profiled in measure(args, pipeline):
        body.append(row)
        profiles[length] = profiled
        print(f"{length:,} tokens done", flush=True)
    show(body)
    write(body, profiles, args, pipeline)


if __name__ == "__main__":
    main()
