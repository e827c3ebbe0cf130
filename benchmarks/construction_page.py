"""The table that `construction.py` prints, and the page that it writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import machine
import torch
from rich.console import Console
from rich.table import Table

from gracekv import Pipeline

STAGES = ("surprisal", "projections", "segment", "value", "tree", "allocate", "pack")
COLUMNS = (
    "tokens", "prefill s", *(f"{stage} s" for stage in STAGES), "construction s", "of prefill",
    "slots", "nodes", "prefill peak MiB", "extra MiB", "extra", "differ", "evaluated tokens",
    "floor s",
)  # fmt: skip


def show(rows: list[list[str]]) -> None:
    """Print the table."""
    table = Table(title="Construction")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)


def write(
    rows: list[list[str]],
    operations: Mapping[int, str],
    args: argparse.Namespace,
    pipeline: Pipeline,
) -> None:
    """Write the page: the table, and the operations at the two largest lengths."""
    out = args.out or Path(__file__).parent / "results" / f"construction-{args.device}.md"
    out.parent.mkdir(exist_ok=True)
    text = ["# Construction", "", *(f"- {line}" for line in _header(args, pipeline)), ""]
    text += [f"| {' | '.join(COLUMNS)} |", f"|{'--:|' * len(COLUMNS)}"]
    text += [f"| {' | '.join(row)} |" for row in rows]
    for length, detail in list(operations.items())[-2:]:
        text += ["", f"## Operations at {length:,} tokens", "", "```", detail, "```"]
    out.write_text("\n".join(text) + "\n")


def _header(args: argparse.Namespace, pipeline: Pipeline) -> list[str]:
    cuda = args.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    what = (
        f"synthetic {args.geometry}, bfloat16"
        if args.geometry
        else "SmolLM2-135M-Instruct, float32, a book chapter repeated to length"
    )
    return [
        f"machine: {machine.cpu()}, {machine.cores()}, {device}; {machine.versions()}",
        f"commit: {machine.commit()}",
        f"model: {what}; ratio {args.ratio}; medians of {args.repeats} runs",
        f"config: {pipeline!r}",
        "Construction is all that compression adds to a prefill that makes one position's logits: "
        "surprisal (all positions' logits) and projections in the capture, and the pipeline's "
        "stages.",
        "Prefill peak: model, prefill and all that is captured for this pipeline, at the highest "
        "(resident memory without what Python and its libraries took before; on a GPU allocated "
        "memory, without a model), in a separate process. Extra: what construction adds to it, the "
        "packed cache included. Differ: kept nodes of the reference allocator that the "
        "fast one did not keep.",
        "Floor: the multiply-adds of the logits (on a CPU) and of the evaluated tokens' "
        "distortion, at the speed of a large float32 product measured in the same run.",
    ]
