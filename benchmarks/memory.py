"""How much memory does a compression take? Writes `benchmarks/results/memory.md`.

A row is measured in `--processes` fresh processes, since the memory that glibc retains differs
between them; the page gives the median, the lowest and the highest. Each process loads the model,
compresses a short prompt so that all code is loaded, and then measures one plain prefill or one
recipe. Highest and held memory are relative to the loaded model: on a CPU, resident memory (VmHWM
after writing 5 to /proc/self/clear_refs, and VmRSS, Linux); on CUDA, torch's allocated memory.
glibc retains much of the memory that torch frees; with `--allocator direct` it returns every block
from 128 KiB on immediately, so resident memory is what torch holds. Each measurement is appended to
`--log` immediately; those of the same code that are already there are not repeated.

    python benchmarks/memory.py                      # all missing rows
    python benchmarks/memory.py --allocator direct --rows prefill gracekv gracekv-plus
    python benchmarks/memory.py --rows prefill gracekv-plus --lengths 7800 --processes 3
    python benchmarks/memory.py --report             # only write the tables
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import memory_model
import torch

import gracekv
from gracekv import Prompt, recipes
from gracekv.files import write_atomically

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
PREFIX, SUFFIX = 16, 48
PREFILL = "prefill"
LENGTHS = {
    "smollm2": (1024, 2048, 4096, 7800),
    "grouped": (16384, 32768),
    "narrow": (32768,),
}
# Read everything before compressing.
WHOLE = "whole "
# A fixed threshold: by default glibc raises it with each large block that is freed.
ALLOCATORS = {"default": {}, "direct": {"MALLOC_MMAP_THRESHOLD_": str(2**17)}}
# One long row of each kind: windows, sums over queries, trees, the default.
LONG = (PREFILL, "snapkv", "h2o", "gracekv", "gracekv-plus")


def load(name: str, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer, or None."""
    if name == "smollm2":
        from gracekv.hf.smollm2 import load_smollm2

        model, tokenizer = load_smollm2()
        return model.to(device), tokenizer
    import transformers

    sizes = {"grouped": memory_model.GROUPED, "narrow": memory_model.NARROW}[name]
    config = transformers.Qwen2Config(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(device), None


def prompt_of(tokenizer: Any, length: int) -> Prompt:
    """The demo's chapter, repeated, or random ids without a tokenizer."""
    if tokenizer is None:
        ids = torch.randint(0, memory_model.GROUPED["vocab_size"], (length,)).tolist()
    else:
        text = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
        ids = tokenizer(text)["input_ids"]
        ids = (ids * (length // len(ids) + 1))[:length]
    return Prompt.from_ids(ids, context=(PREFIX, length - SUFFIX), question_end=length - 8)


def run(model: Any, prompt: Prompt, row: str, ratio: str) -> Any:
    """Run the row's work, and return everything that stays alive."""
    if row == PREFILL:
        ids = prompt.ids[None].to(model.device)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    options = gracekv.CaptureOptions(stream=False if row.startswith(WHOLE) else None)
    pipeline = row.removeprefix(WHOLE)
    return gracekv.compress(model, prompt, ratio=ratio, pipeline=pipeline, capture=options)


class Meter:
    """Memory above the level at construction."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _kib("VmRSS") * 1024

    def highest(self) -> float:
        """Peak MiB so far."""
        used = torch.cuda.max_memory_allocated() if self._cuda else _kib("VmHWM") * 1024
        return (used - self._before) / MIB

    def held(self) -> float:
        """Current MiB."""
        used = torch.cuda.memory_allocated() if self._cuda else _kib("VmRSS") * 1024
        return (used - self._before) / MIB


def _kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def measure(name: str, length: int, row: str, ratio: str, device: str) -> dict[str, Any]:
    """Measure a row in this process."""
    model, tokenizer = load(name, device)
    short = run(model, prompt_of(tokenizer, 512), row, ratio)
    prompt = prompt_of(tokenizer, length)
    del short
    meter, start = Meter(device), time.perf_counter()
    result = run(model, prompt, row, ratio)
    seconds = time.perf_counter() - start
    gc.collect()
    fields = {
        "highest": round(meter.highest(), 1),
        "held": round(meter.held(), 1),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        **where(),
    }
    if row != PREFILL:
        kept = result.accounting
        fields["cache"] = round((kept.bytes + kept.metadata_bytes) / MIB, 1)
    return fields


def rows_of(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """(model, length, row), quick ones first."""
    found = []
    for name in args.models:
        for length in args.lengths or LENGTHS[name]:
            known = LONG if length > 8192 else (PREFILL, *recipes.names())
            found += [(name, length, row) for row in args.rows or known]
    return sorted(found, key=lambda row: (row[1], row[0]))


def where() -> dict[str, str]:
    """Machine and code, as recorded in every row."""
    place = f"{machine.cpu()}, {machine.cores()}"
    code = {"commit": machine.commit(), "code": machine.digest()}
    return {"machine": place, **code, "versions": machine.versions()}


def rows_in(log: Path) -> list[dict[str, Any]]:
    """The measurements of this code, here, with these versions; the last one if repeated."""
    names, here, found = ("machine", "code", "versions"), where(), {}
    for line in log.read_text().splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):  # a line that was being written at a kill
            row = json.loads(line)
            if all(row.get(name) == here[name] for name in names):
                found[key_of(row)] = row
    return list(found.values())


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The identity of a measurement."""
    names = ("model", "length", "row", "ratio", "device", "allocator", "process")
    return tuple(row[name] for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--rows", nargs="+", metavar="RECIPE", help="prefill, or recipes")
    parser.add_argument("--ratio", default="8")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--allocator", default="default", choices=list(ALLOCATORS))
    parser.add_argument("--processes", type=int, default=1, help="for each row")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.md")
    parser.add_argument("--log", type=Path, default=Path("runs/memory.jsonl"), help="of rows")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "LENGTH", "ROW"), help="in this process"
    )
    args = parser.parse_args()
    if args.one:
        name, length, row = args.one
        print(json.dumps(measure(name, int(length), row, args.ratio, args.device)))
        return
    args.log.parent.mkdir(parents=True, exist_ok=True)
    known = {key_of(row) for row in rows_in(args.log) if "status" not in row}
    environment = {**os.environ, **ALLOCATORS[args.allocator]}
    # All rows once, then again, so that an interrupted run has measured as many rows as possible.
    asked = [(process, *row) for process in range(args.processes) for row in rows_of(args)]
    failed = []
    for process, name, length, row in [] if args.report else asked:
        own = {
            "model": name, "length": length, "row": row, "ratio": args.ratio,
            "device": args.device, "allocator": args.allocator, "process": process,
        }  # fmt: skip
        if key_of(own) in known:
            continue
        command = [sys.executable, __file__, "--one", name, str(length), row]
        command += ["--ratio", args.ratio, "--device", args.device]
        child = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        if child.returncode:
            print(f"{name} {length} {row}: failed\n{child.stderr[-2000:]}", file=sys.stderr)
            failed.append(row)
            line = json.dumps({**own, **where(), "status": child.returncode})
        else:
            line = json.dumps({**json.loads(child.stdout.splitlines()[-1]), **own})
        print(line, flush=True)
        # In one call, since another process may write at the same time. The first line end closes
        # a line that was not finished.
        with args.log.open("a") as file:
            file.write(f"\n{line}\n")
    if not (done := [row for row in rows_in(args.log) if row["ratio"] == args.ratio]):
        raise SystemExit(f"{args.log} has no rows of this code, machine and ratio {args.ratio}.")
    write_atomically(args.out, memory_model.report(done).encode())
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
