"""How fast is decoding? Prints tables and writes `benchmarks/results/decode.md`.

Attention alone, relative to the bytes that it reads, and whole-model milliseconds per token, for
FullKV and compressed caches. The time of a step depends on how many entries each head holds, not on
which: except with `--real`, keys, values and the heads' lengths are random.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import machine
import torch
from decode_shapes import GEOMETRIES, TAIL, Attention, compressed, full_cache, model_of
from decode_steps import copy_speed, graphed, interleaved, timed_caches
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import Cache

import gracekv
from gracekv.backends import Auto
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2


def attention_rows(
    options: argparse.Namespace, dtype: torch.dtype, copy: float
) -> Iterable[list[str]]:
    device = options.device
    like = torch.empty(0, dtype=dtype, device=device)
    for length, batch, skew in product(options.lengths, options.batches, options.skews):
        asked = Attention(GEOMETRIES[options.geometry], batch, length, skew, like)
        steps = asked.full()
        sizes = dict.fromkeys(steps, asked.full_bytes)
        for ratio in options.ratios:
            steps[f"{ratio}x"], sizes[f"{ratio}x"] = asked.ours(ratio)
            # As many entries with fewer bits. On GPUs, the Triton kernel cannot read them.
            for bits in options.bits if device == "cpu" else ():
                name = f"{ratio}x, {bits} bits"
                steps[name], sizes[name] = asked.ours(ratio, bits)
        taken = interleaved(
            {name: graphed(step, device) for name, step in steps.items()},
            device,
            options.rounds,
            chosen=min if options.least else statistics.median,
        )
        for name, total in taken.items():
            seconds = total / asked.copies
            faster, fewer = taken["FullKV"] / total, asked.full_bytes / sizes[name]
            yield [
                f"{length:,}", f"{batch}", f"{skew:g}x", name, f"{sizes[name] / 2**20:.2f}",
                f"{seconds * 1e6:.0f}", f"{sizes[name] / seconds / 1e9:.1f}",
                f"{sizes[name] / seconds / copy:.0%}", f"{faster:.2f}x", f"{fewer:.2f}x",
                f"{faster / fewer:.2f}",
            ]  # fmt: skip


ATTENTION = (
    "context", "batch", "longest / other heads", "cache", "MiB read per layer", "us per layer",
    "GB/s", "of copy", "speed-up", "fewer bytes", "speed-up / fewer bytes",
)  # fmt: skip


def model_rows(options: argparse.Namespace, model: Any, dtype: torch.dtype) -> Iterable[list[str]]:
    geometry = GEOMETRIES[options.geometry]
    like = torch.empty(0, dtype=dtype, device=options.device)
    weights = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    for length, batch in product(options.lengths, options.batches):
        caches: dict[str, Cache] = {}
        try:
            caches["FullKV"] = full_cache(geometry, batch, length, like)
        except torch.OutOfMemoryError:
            yield [f"{length:,}", f"{batch}", "FullKV", "out of memory", "", "", ""]
        for ratio in options.ratios:
            if ratio > 1 or options.device == "cpu":
                caches[f"{ratio}x"] = compressed(geometry, batch, length, ratio, like)
        full = 2 * batch * length * geometry.kv_heads * geometry.dim * dtype.itemsize
        full *= geometry.layers
        taken = timed_caches(model, caches, batch, options.device, options.rounds)
        for name, seconds in taken.items():
            cache = caches[name]
            read = (
                sum(x.packed.entries.kv_bytes for x in cache.layers) if name != "FullKV" else full
            )
            yield [
                f"{length:,}", f"{batch}", name, f"{weights / 2**20:.0f}", f"{read / 2**20:.0f}",
                f"{seconds * 1e3:.1f}", f"{taken.get('FullKV', math.nan) / seconds:.2f}x",
            ]  # fmt: skip


def real_rows(options: argparse.Namespace) -> Iterable[list[str]]:
    """The whole pipeline on a book chapter, repeated up to the context's length."""
    model, tokenizer = load_smollm2(getattr(torch, options.dtype.split(",")[0]))
    text = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    share = options.real / len(tokenizer(text).input_ids)
    text = (text * (int(share) + 1))[: int(len(text) * share)]
    prompt = gracekv.Prompt.from_chat(tokenizer, context=text, question="Who is Dinah?")
    prefill = gracekv.capture(model, prompt)
    results = {
        f"{ratio}x": gracekv.compress(model, prompt, prefill=prefill, ratio=ratio)
        for ratio in options.ratios
        if ratio > 1
    }
    full = DynamicCache()
    for number, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
        full.update(keys[None, :, :-1], values[None, :, :-1], number)
    caches = {"FullKV": full, **{name: result.new_cache() for name, result in results.items()}}
    taken = timed_caches(model, caches, 1, options.device, options.rounds)
    for name, seconds in taken.items():
        packed, held = sum(2 * x[:, :-1].nbytes for x in prefill.keys), 0
        longest = 1.0
        if name in results:
            accounting = results[name].accounting
            packed, held = accounting.bytes, accounting.backend_bytes
            entries = results[name].packed.entries().double()
            longest = float((entries.amax(1) / entries.mean(1)).mean())
        yield [
            f"{len(prompt.ids):,}", name, f"{packed / 2**20:.1f}", f"{held / 2**20:.1f}",
            f"{longest:.2f}", f"{seconds * 1e3:.1f}", f"{taken['FullKV'] / seconds:.2f}x",
        ]  # fmt: skip


MODEL = (
    "context", "batch", "cache", "MiB of weights", "MiB of K and V", "ms/token", "speed-up",
)  # fmt: skip
REAL = (
    "prompt", "cache", "MiB of K and V", "MiB held by the backend",
    "longest head / mean, in a layer", "ms/token", "speed-up",
)  # fmt: skip


def header(options: argparse.Namespace, copy: float) -> list[str]:
    where = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    return [
        f"machine: {machine.cpu()}, {machine.cores()}, {where}, "
        f"{torch.get_num_threads()} thread(s), a copy moves {copy / 1e9:.1f} GB/s; "
        f"{machine.versions()}",
        f"commit: {machine.commit()}",
        f"dtype: {options.dtype}",
        f"config: {options.geometry}, {GEOMETRIES[options.geometry]}; "
        f"{Auto().describe(options.device)}",
        f"{'the least' if options.least else 'medians'} of {options.rounds} rounds after 2 of "
        f"warming up; a round takes every row of a block in turn. Keys, values and head lengths "
        f"are random (heads of a layer differ up to threefold, or one is as much longer as the "
        f"table says), log multiplicities too, and in attention alone {TAIL} tokens follow the "
        f"packed entries; only the table named so is a real compression.",
        "FullKV is torch's sdpa with enable_gqa, as transformers calls it, in the model over its "
        "DynamicCache (a fixed cache where steps are CUDA graphs). Heads folded: the same kernel "
        "with the query heads of a group as rows. 1x is our backend over all entries.",
    ]


def table(title: str, columns: tuple[str, ...], body: list[list[str]]) -> tuple[Table, list[str]]:
    shown = Table(title=title)
    for column in columns:
        shown.add_column(column, justify="right")
    for row in body:
        shown.add_row(*row)
    text = [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'--:|' * len(columns)}"]
    return shown, [*text, *(f"| {' | '.join(row)} |" for row in body), ""]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--geometry", choices=list(GEOMETRIES), help="smollm2 on the CPU, else qwen2.5-7b")
    add("--lengths", type=numbers, help="contexts, such as 4096,8192")
    add("--ratios", type=numbers, default=[1, 4, 8, 16])
    add("--bits", type=numbers, default=[8, 4], help="widths of quantised entries")
    add("--dtype", help="float32 (CPU), bfloat16 (elsewhere), or both for attention alone")
    add("--batches", type=numbers, default=[1])
    add("--skews", type=numbers, default=[3], help="longest head of a layer over the others")
    add("--rounds", type=int, default=25)
    add("--least", action="store_true", help="attention: the fastest round, not the median")
    add("--parts", default="attention,model,real", help="which tables to make")
    add("--real", type=int, default=4096, help="context tokens of the real compression")
    add("--title", default="Decoding", help="of the file")
    add("--note", action="append", default=[], help="a note about this run, for the page")
    add("--out", type=Path, default=Path(__file__).parent / "results" / "decode.md")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    options.geometry = options.geometry or ("smollm2" if cpu else "qwen2.5-7b")
    options.lengths = options.lengths or ([4096, 8192] if cpu else [8192, 32768, 131072])
    return options


@torch.inference_mode()
def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    names = options.dtype.split(",")
    dtype = getattr(torch, names[0])
    copy, parts = copy_speed(options.device), options.parts.split(",")
    lines = header(options, copy) + options.note
    console = Console(width=180)
    text = [f"# {options.title}", "", *(f"- {line}" for line in lines), ""]
    made: list[tuple[str, tuple[str, ...], list[list[str]]]] = []
    if "attention" in parts:
        for name in names:
            title = "Attention of one token, alone" + (f", {name}" if len(names) > 1 else "")
            rows = list(attention_rows(options, getattr(torch, name), copy))
            made.append((title, ATTENTION, rows))
    if "model" in parts:
        rows = list(
            model_rows(
                options, model_of(GEOMETRIES[options.geometry], dtype, options.device), dtype
            )
        )
        made.append(("Whole model", MODEL, rows))
    if "real" in parts and options.geometry == "smollm2" and options.device == "cpu":
        made.append(("Whole model, a real compression", REAL, list(real_rows(options))))
    for title, columns, body in made:
        shown, markdown = table(title, columns, body)
        console.print(shown)
        text += markdown
    write_atomically(options.out, ("\n".join(text)).encode())


if __name__ == "__main__":
    main()
