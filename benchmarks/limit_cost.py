"""What cuts cost beside decoding: `benchmarks/results/limit_cost.md`.

    OMP_NUM_THREADS=1 python benchmarks/limit_cost.py

SmolLM2 over a made-up cache of 4,096 entries per head, of which every cut leaves as many: steps of
one token, and cuts after `--every` tokens. Seconds are the process's own on one thread, so that
other work of the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from machine import commit, threads, versions

from gracekv import Limit
from gracekv.backends import Auto
from gracekv.cache import RaggedCache
from gracekv.cache.base import RaggedEntries
from gracekv.decode import DECODERS
from gracekv.files import write_atomically
from gracekv.hf import GraceCache, attach
from gracekv.hf.limited import LimitedCache
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "limit_cost.md"


def made_up(model: torch.nn.Module, entries: int) -> GraceCache:
    """A cache of random keys and values, as a prompt of so many tokens would fill it."""
    rng = torch.Generator().manual_seed(0)
    config = model.config
    shape = (config.num_key_value_heads, entries, config.hidden_size // config.num_attention_heads)
    layers = [
        RaggedEntries.dense(torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))
        for _ in range(config.num_hidden_layers)
    ]
    return GraceCache(RaggedCache(tuple(layers), length=entries), Auto())


@torch.no_grad()
def measured(model: torch.nn.Module, name: str, entries: int, every: int) -> tuple[float, float]:
    """Median CPU seconds of a step, and those of a cut."""
    limit = Limit(entries_per_head=entries + 64, every=every, window=32, strategy=name)
    cache = LimitedCache(made_up(model, entries), model, limit, DECODERS.build(name))
    model(input_ids=torch.arange(every)[None], past_key_values=cache)
    steps = []
    for token in range(12):
        start = time.process_time()
        model(input_ids=torch.tensor([[token]]), past_key_values=cache)
        steps.append(time.process_time() - start)
    start = time.process_time()
    cache.make_room(torch.zeros(1, every), None)
    return statistics.median(steps), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--every", type=int, default=256)
    parser.add_argument("--strategies", nargs="*")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    model, _ = load_smollm2()
    attach(model)
    rows = []
    for name in args.strategies or DECODERS:
        if name != "none":
            step, cut = measured(model, name, args.entries, args.every)
            share = cut / (args.every * step)
            rows.append(
                f"| `{name}` | {1000 * step:.0f} | {1000 * cut:.0f} | {100 * share:.1f} % |"
            )
            print(rows[-1], flush=True)
    head = f"""# What cuts cost beside decoding

- machine: {threads()}; {versions()}
- commit: {commit()}
- command: `python benchmarks/limit_cost.py`
- model: SmolLM2-135M-Instruct, float32
- config: {args.entries:,} entries per head, a cut every {args.every} tokens; CPU seconds of the \
process, median of 12 steps, one cut

| strategy | ms a step | ms a cut | of decoding |
|---|--:|--:|--:|
"""
    write_atomically(args.out, (head + "\n".join(rows) + "\n").encode())


if __name__ == "__main__":
    main()
