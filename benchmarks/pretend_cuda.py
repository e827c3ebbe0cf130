"""Counts on a CPU a compression's GPU launches, waits and attention calls by line.

    python benchmarks/pretend_cuda.py gracekv-plus snapkv --layers 8 --tokens 2048

Tensors claim to be on cuda:0 but are computed on the CPU, so gracekv takes its CUDA paths. "plain"
is the model's forward pass alone; a pipeline file may replace a recipe's name. Launches are those
of torch's CUDA kernels; waits are numbers read from the device, boolean masks as indices, and
copies between host and device. Seconds are modelled, not measured: an H100's peak rates, 6 us per
launch, 10 us per wait. Needs g++ and Triton.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from pretend_counts import Count, Ledger
from pretend_gpu import pretend, to_pretended
from pretend_tensors import AttentionMode, PretendMode, State

import gracekv
from gracekv.pipeline.config import load_pipeline

VOCABULARY = 1000


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--whole", action="store_true", help="read everything, then compress")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk")
    parser.add_argument("--top", type=int, default=25, help="lines to show")
    parser.add_argument("--json", type=Path, help="write totals here")
    return parser.parse_args()


def built(args: argparse.Namespace, layers: int) -> Any:
    """A model with random weights on the pretended GPU."""
    # Imports triton, which then reads what `pretend` has set.
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512,
        num_hidden_layers=layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_dim=args.dim,
        max_position_embeddings=max(4096, 2 * args.tokens), rope_theta=1e6,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            # Peaked attention, as real models have it.
            peak = 2 if "q_proj" in name or "k_proj" in name else 1
            weight.data.normal_(std=peak * weight.shape[-1] ** -0.5)
    return to_pretended(model.to(getattr(torch, args.dtype)).eval())


def counted(model: Any, recipe: str, args: argparse.Namespace) -> Ledger:
    """The ledger of one compression, or of a plain forward pass."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (args.tokens,), generator=random)
    State.ledger = ledger = Ledger()
    with torch.no_grad(), PretendMode(), AttentionMode():
        if recipe == "plain":
            model(input_ids=ids[None].to("cuda"), use_cache=True, logits_to_keep=1)
        else:
            prompt = gracekv.Prompt.from_ids(ids, context=(0, args.tokens - 20))
            stream = False if args.whole else None
            options = gracekv.CaptureOptions(stream=stream, chunk=args.chunk)
            pipeline = load_pipeline(recipe)
            gracekv.compress(model, prompt, ratio=args.ratio, pipeline=pipeline, capture=options)
    return ledger


def show(ledger: Ledger, recipe: str, layers: int, args: argparse.Namespace) -> None:
    """Print stages, the lines with most requests, and attention calls."""

    def row(name: str, count: Count) -> str:
        return (
            f"{name:44}{count.launches:9,}{count.syncs:7,}{count.launches / layers:9.1f}"
            f"{count.busy * 1e3:8.1f}{count.host * 1e3:9.1f}{count.seconds * 1e3:13.1f}"
        )

    reading = "whole" if args.whole else "streaming where it can"
    print(f"\n{recipe}: {layers} layers, {args.tokens:,} tokens, {args.dtype}, {reading}")
    print(f"{'stage':44} launches  waits  a layer  GPU ms  host ms  modelled ms")
    stages = ledger.total(by=0)
    for name in sorted(stages, key=lambda x: -stages[x].launches):
        print(row(name, stages[name]))
    print(row("total", ledger.total()[""]))
    lines = ledger.total(by=1)
    for what, title in (("launches", "launches"), ("syncs", "waits")):
        print(f"\n{title} by line")
        for name in sorted(lines, key=lambda x: -getattr(lines[x], what))[: args.top]:
            if getattr(lines[name], what):
                common = ", ".join(f"{x} x{n}" for x, n in lines[name].names.most_common(4))
                print(f"{getattr(lines[name], what):7,} {name:42} {common}")
    print("\nattention calls")
    for (kernel, shape, line), calls in ledger.attention.most_common(args.top):
        print(f"{calls:7,} {kernel:10} {shape:28} {line}")
    for why, times in ledger.refused.most_common():
        print(f"CUDA would raise, {times} times: {why}")


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    pretend()
    rows = []
    for layers in args.layers:
        model = built(args, layers)
        for recipe in args.recipes:
            started = time.perf_counter()
            ledger = counted(model, recipe, args)
            show(ledger, recipe, layers, args)
            print(f"{time.perf_counter() - started:.1f} s")
            total = ledger.total()[""]
            attention: Counter[str] = Counter()
            for (kernel, _, _), calls in ledger.attention.items():
                attention[kernel] += calls
            rows.append({
                "recipe": recipe, "layers": layers, "launches": total.launches,
                "syncs": total.syncs, "attention": attention, "refused": sorted(ledger.refused),
            })  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
