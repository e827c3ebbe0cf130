"""The parts of `gpu.py` that measure speed, against the bars."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from construction_plus import PREFILL, against_prefill
from decode_shapes import GEOMETRIES, Attention, compressed, full_cache
from decode_steps import graphed, interleaved, timed_caches
from gpu_bench import Bench
from gpu_report import Case, Row

import gracekv
from gracekv.files import write_atomically
from gracekv.hf import detach

RECIPES = ("gracekv-plus", "gracekv-agnostic", "gracekv-plus-allocated", "gracekv", "snapkv")
# The bars: a compression over a plain prefill, seconds (the paper's method up to 32K) and, from 32K
# on, peak memory; attention over a copy; a decoding step over FullKV's from 30K on at batch 8.
TOTAL = {
    "gracekv-plus": 1.15,
    "gracekv-agnostic": 1.15,
    "gracekv-plus-allocated": 1.3,
    "gracekv": 1.5,
}
PEAK, OF_COPY, SPEED_UP = 0.6, 0.75, 1.7
# Maximum rounds of a compression, and seconds after which no further one begins.
ROUNDS, PATIENCE = 5, 40.0
# Events in which the host waits for a GPU, and operations that make it wait.
WAITS = {
    "cuda": re.compile("Synchronize"),
    "cpu": re.compile("aten::(_local_scalar_dense|nonzero|_unique2)$"),
}


def attention(bench: Bench) -> Iterator[Case]:
    """One token's attention in bytes per second against a copy, at several imbalances of heads."""
    options, device = bench.options, bench.options.device
    geometry, like = GEOMETRIES[options.geometry], torch.empty(0, dtype=bench.dtype, device=device)
    skews = (3, 50) if not options.tiny else (3,)
    for length, batch, skew in product(options.lengths, options.batches, skews):
        for graphs in (True, False) if bench.cuda else (False,):

            def work(
                length: int = length, batch: int = batch, skew: int = skew, graphs: bool = graphs
            ) -> Row:
                asked = Attention(geometry, batch, length, skew, like)
                step, size = asked.ours(options.ratio)
                if graphs:
                    step = graphed(step, device)
                seconds = interleaved({"": step}, device, options.rounds)[""] / asked.copies
                speed = size / seconds
                row = {
                    "us a layer": seconds * 1e6,
                    "GB/s": speed / 1e9,
                    "of copy": speed / bench.copied,
                }
                if graphs:
                    row["bar"] = "met" if speed >= OF_COPY * bench.copied else "missed"
                return row

            labels = {"context": length, "batch": batch, "skew": skew, "graph": graphs}
            yield Case(labels, work, 5)


def decode(bench: Bench) -> Iterator[Case]:
    """A whole model's decoding step over FullKV and over a compressed cache."""
    options, device = bench.options, bench.options.device
    geometry, like = GEOMETRIES[options.geometry], torch.empty(0, dtype=bench.dtype, device=device)
    full_entry = 2 * geometry.kv_heads * geometry.dim * bench.dtype.itemsize * geometry.layers
    for length, batch in product(options.lengths, options.batches):
        for graphs in (True, False) if bench.cuda else (False,):

            def work(length: int = length, batch: int = batch, graphs: bool = graphs) -> Row:
                taken: dict[str, float] = {}
                model = bench.model
                weights = sum(p.nbytes for p in model.parameters())
                # A step reads one row of input embeddings, all of them if they are the output's.
                table = model.get_input_embeddings().weight
                if table is not model.get_output_embeddings().weight:
                    weights -= table.nbytes
                ours = {"ours": compressed(geometry, batch, length, options.ratio, like)}
                timed = functools.partial(
                    timed_caches, model, batch=batch, device=device, rounds=options.rounds,
                    graphs=graphs, static=True,
                )  # fmt: skip
                taken |= timed(caches=ours)
                read = weights + sum(layer.packed.entries.kv_bytes for layer in ours["ours"].layers)
                row: Row = {"ms": taken["ours"] * 1e3, "GB/s": read / taken["ours"] / 1e9}
                try:
                    taken |= timed(caches={"full": full_cache(geometry, batch, length, like)})
                except torch.OutOfMemoryError:
                    return {**row, "FullKV ms": "out of memory"}
                read = weights + batch * length * full_entry
                row |= {"FullKV ms": taken["full"] * 1e3, "FullKV GB/s": read / taken["full"] / 1e9}
                row["speed-up"] = taken["full"] / taken["ours"]
                if graphs and batch == 8 and length >= 30_000:
                    row["bar"] = "met" if row["speed-up"] >= SPEED_UP else "missed"
                return row

            labels = {"context": length, "batch": batch, "graph": graphs}
            yield Case(labels, work, 10)


def compress(bench: Bench) -> Iterator[Case]:
    """`compress` end to end against a plain prefill, in turn, both after a warm-up pass."""
    options = bench.options
    for length, name in product(options.lengths, RECIPES):

        def work(length: int = length, name: str = name) -> Row:
            made: list[Any] = []

            def once() -> None:
                made[:] = [
                    gracekv.compress(
                        bench.model, prompt, ratio=options.ratio, pipeline=name
                    ).timings
                ]

            prompt = bench.prompt(length)
            detach(bench.model)
            ids = prompt.ids[None].to(options.device)
            once()  # compiles kernels of these shapes
            rounds = min(ROUNDS, options.rounds)
            taken = against_prefill(bench.model, ids, {name: once}, rounds, PATIENCE)
            (plain, plain_peak), (total, peak) = taken[PREFILL], taken[name]
            row: Row = {"plain s": plain, "total s": total, "of plain": total / plain}
            if bench.cuda:
                of_peak = peak / plain_peak
                row |= {"plain GiB": plain_peak, "peak GiB": peak, "of plain GiB": of_peak}
                if name in TOTAL and (name != "gracekv" or length <= 32768):
                    row["bar: time"] = "met" if total <= TOTAL[name] * plain else "missed"
                if length >= 32768:
                    row["bar: memory"] = "met" if of_peak <= PEAK else "missed"
            return row | {stage: took for stage, took in made[0].as_dict().items() if took}

        # 30 s to build the model and compile, then an estimate of four passes.
        yield Case({"context": length, "recipe": name}, work, 30 + length / 1000)


def profile(bench: Bench) -> Iterator[Case]:
    """One compression by torch's profiler: a trace for chrome://tracing, and the top operations."""
    options = bench.options

    def work() -> Row:
        prompt = bench.prompt(options.lengths[0])

        def once() -> object:
            return gracekv.compress(
                bench.model, prompt, ratio=options.ratio, pipeline="gracekv-plus"
            )

        once()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if bench.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as recorded:
            once()
        trace, table = (options.out / f"gpu-profile.{end}" for end in ("json.gz", "txt"))
        recorded.export_chrome_trace(str(trace))
        found = recorded.key_averages()
        waits = [event for event in found if WAITS[options.device].search(event.key)]
        lines = [f"{x.count:8} {x.cpu_time_total / 1e3:10.2f} ms  {x.key}" for x in waits]
        key = "self_cuda_time_total" if bench.cuda else "self_cpu_time_total"
        tables = [found.table(sort_by=by, row_limit=25) for by in (key, "self_cpu_time_total")]
        write_atomically(table, "\n".join(["Host waits", *lines, *tables]).encode())
        launches = sum(x.count for x in found if x.key.startswith(("cudaLaunch", "cuLaunch")))
        return {
            "launches": launches,
            "waits": sum(event.count for event in waits),
            "trace": trace.name,
            "table": table.name,
        }

    yield Case({"context": options.lengths[0], "recipe": "gracekv-plus"}, work, 60)
