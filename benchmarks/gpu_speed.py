"""The parts of `gpu.py` that say how fast everything is, against the bars."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import torch
from decode_shapes import GEOMETRIES, Attention, compressed, full_cache
from decode_steps import copy_speed, graphed, interleaved, timed_caches
from gpu_bench import Bench
from gpu_report import Row

import gracekv
from gracekv.hf import detach

RECIPES = ("gracekv-plus", "gracekv", "snapkv")
# The bars: seconds of construction at 8K, its share of the prefill from 32K on, peak memory over a
# plain prefill's, attention over a copy, and a decoding step over FullKV's from 30K on at batch 8.
CONSTRUCTION_8K = {"gracekv-plus": 0.10, "gracekv": 0.40}
CONSTRUCTION_SHARE, PEAK, OF_COPY, SPEED_UP = 0.25, 1.05, 0.75, 1.7


def attention(bench: Bench) -> None:
    """One token's attention as bytes per second against a copy, at several imbalances of heads."""
    options, device = bench.options, bench.options.device
    geometry, like = GEOMETRIES[options.geometry], torch.empty(0, dtype=bench.dtype, device=device)
    copied = copy_speed(device, (1024 if bench.cuda else 8) << 20)
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
                row = {"us a layer": seconds * 1e6, "GB/s": speed / 1e9, "of copy": speed / copied}
                if graphs:
                    row["bar"] = "met" if speed >= OF_COPY * copied else "missed"
                return row

            labels = {"context": length, "batch": batch, "skew": skew, "graph": graphs}
            bench.rows.measure("attention", labels, work)


def decode(bench: Bench) -> None:
    """A whole model's decoding step over FullKV and over a compressed cache."""
    options, device = bench.options, bench.options.device
    geometry, like = GEOMETRIES[options.geometry], torch.empty(0, dtype=bench.dtype, device=device)
    model = bench.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    full_entry = 2 * geometry.kv_heads * geometry.dim * bench.dtype.itemsize * geometry.layers
    for length, batch in product(options.lengths, options.batches):
        for graphs in (True, False) if bench.cuda else (False,):

            def work(length: int = length, batch: int = batch, graphs: bool = graphs) -> Row:
                taken: dict[str, float] = {}
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
            bench.rows.measure("decode", labels, work)


def compress(bench: Bench) -> None:
    """`compress` end to end: seconds of every stage and peak memory, beside a plain prefill."""
    options, model = bench.options, bench.model
    for length in options.lengths:
        prompt = bench.prompt(length)
        ids = prompt.ids[None].to(options.device)

        def plain(ids: torch.Tensor = ids) -> Row:
            detach(model)
            with torch.inference_mode():
                bench.seconds(lambda: model(ids[:, :64], logits_to_keep=1))
                seconds, peak = bench.seconds(lambda: model(ids, logits_to_keep=1))
            return {"total s": seconds, "peak GiB": peak}

        alone = bench.rows.measure("compress", {"context": length, "recipe": "prefill"}, plain)
        for name in RECIPES:

            def work(name: str = name, prompt: gracekv.Prompt = prompt, alone: Row = alone) -> Row:
                made: list[Any] = []

                def once() -> None:
                    made[:] = [gracekv.compress(model, prompt, ratio=options.ratio, pipeline=name)]

                if len(prompt.ids) == options.lengths[0]:
                    once()  # compiles the kernels
                    made.clear()
                seconds, peak = bench.seconds(once)
                timings = made[0].timings
                stages = {stage: took for stage, took in timings.as_dict().items() if took}
                row: Row = {"total s": seconds, "peak GiB": peak, **stages}
                row["construction s"] = timings.construction
                limit = CONSTRUCTION_8K.get(name) if len(prompt.ids) == 8192 else None
                if len(prompt.ids) >= 32768:
                    limit = CONSTRUCTION_SHARE * timings.prefill
                if bench.cuda and limit is not None:
                    row["bar: seconds"] = "met" if timings.construction <= limit else "missed"
                if bench.cuda and alone.get("peak GiB"):
                    row["of plain peak"] = peak / alone["peak GiB"]
                    row["bar: memory"] = "met" if row["of plain peak"] <= PEAK else "missed"
                return row

            bench.rows.measure("compress", {"context": length, "recipe": name}, work)


def profile(bench: Bench) -> None:
    """The twenty most expensive kernels of one compression and eight decoding steps."""
    model, prompt = bench.model, bench.prompt(bench.options.lengths[0])
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        result = gracekv.compress(model, prompt, ratio=bench.options.ratio, pipeline="gracekv-plus")
        result.generate_ids(8, eos_token_id=None)
    key = "self_device_time_total" if bench.cuda else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, key))[:20]
    for event in events:
        row = {"calls": event.count, "ms": getattr(event, key) / 1e3}
        bench.rows.measure("profile", {"kernel": event.key[:80]}, lambda row=row: row)
