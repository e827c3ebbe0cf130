"""The cost of cuts relative to decoding: `benchmarks/results/limit-cost.md`.

    python benchmarks/limit_cost.py

SmolLM2 over a synthetic cache, which every cut brings back to 4,096 entries per head. A round is a
few steps of one token and a cut, strategy after strategy, so that machine load affects all of them
alike; a share is a cut's seconds over those of `--every` steps of its round. CPU seconds are the
process's own and exclude other work on the machine.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from machine import commit, cores, cpu, versions

from gracekv import Limit
from gracekv.backends import Auto
from gracekv.cache import RaggedCache
from gracekv.cache.base import RaggedEntries
from gracekv.decode import DECODERS
from gracekv.files import write_atomically
from gracekv.hf import GraceCache, attach
from gracekv.hf.limited import LimitedCache
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "limit-cost.md"
# Steps of a round.
STEPS = 8
# CPU and wall seconds.
CLOCKS = (time.process_time, time.perf_counter)


def made_up(model: torch.nn.Module, entries: int) -> GraceCache:
    """A cache of random keys and values, filled as by a prompt of this many tokens."""
    rng = torch.Generator().manual_seed(0)
    config = model.config
    shape = (config.num_key_value_heads, entries, config.hidden_size // config.num_attention_heads)
    layers = [
        RaggedEntries.dense(torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))
        for _ in range(config.num_hidden_layers)
    ]
    return GraceCache(RaggedCache(tuple(layers), length=entries), Auto())


def seconds(work: Callable[[], object]) -> tuple[float, ...]:
    """CPU and wall seconds of `work`."""
    before = [clock() for clock in CLOCKS]
    work()
    return tuple(clock() - start for clock, start in zip(CLOCKS, before, strict=True))


@torch.no_grad()
def one_round(model: torch.nn.Module, cache: GraceCache, every: int) -> list[tuple[float, float]]:
    """(step, cut) in CPU and in wall seconds, on a copy of `cache`."""
    token, cache = torch.zeros(1, 1, dtype=torch.long), copy.deepcopy(cache)
    steps = [seconds(lambda: model(input_ids=token, past_key_values=cache)) for _ in range(STEPS)]
    before = cache.cuts
    cut = seconds(lambda: cache.make_room(torch.zeros(1, every), None))
    if cache.cuts == before:
        raise SystemExit(f"Nothing was cut: give more --entries, or --every above {every}.")
    return [
        (statistics.median(step), own)
        for step, own in zip(zip(*steps, strict=True), cut, strict=True)
    ]


def row(name: str, rounds: Sequence[Sequence[tuple[float, float]]], every: int) -> str:
    """A line of the table: medians over rounds, and the range of their shares."""
    cells = []
    for own in zip(*rounds, strict=True):
        steps, cuts = zip(*own, strict=True)
        shares = sorted(100 * cut / (every * step) for step, cut in own)
        cells += [
            f"{1000 * statistics.median(steps):.0f}",
            f"{1000 * statistics.median(cuts):.0f}",
            f"{statistics.median(shares):.1f} % ({shares[0]:.1f} to {shares[-1]:.1f})",
        ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--every", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--strategies", nargs="*")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    model, _ = load_smollm2()
    attach(model)
    source, caches = made_up(model, args.entries), {}
    for name in args.strategies or [name for name in DECODERS if name != "none"]:
        limit = Limit(entries_per_head=args.entries + 64, every=args.every, strategy=name)
        cache = caches[name] = LimitedCache(source, model, limit, DECODERS.build(name))
        with torch.no_grad():
            model(input_ids=torch.arange(args.every)[None], past_key_values=cache)
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        # The first round compiles, and is not counted.
        rounds = [
            {name: one_round(model, cache, args.every) for name, cache in caches.items()}
            for _ in range(args.rounds + 1)
        ][1:]
        for name in caches:
            rows.append(row(f"{threads} | `{name}`", [own[name] for own in rounds], args.every))
            print(rows[-1], flush=True)
    head = f"""# What cuts cost beside decoding

- machine: {cores()}, CPU ({cpu()}); {versions()}
- commit: {commit()}
- command: `python benchmarks/limit_cost.py {" ".join(sys.argv[1:])}`
- model: SmolLM2-135M-Instruct, float32
- config: {args.entries:,} entries per head, a cut every {args.every} tokens, strategies as they \
are by default; medians of {args.rounds} interleaved rounds of {STEPS} steps and a cut in one \
process; shares are of {args.every} steps, with the smallest and the largest of a round

| threads | strategy | CPU ms a step | CPU ms a cut | of decoding, CPU | wall ms a step | wall ms \
a cut | of decoding, wall |
|--:|---|--:|--:|--:|--:|--:|--:|
"""
    write_atomically(args.out, (head + "\n".join(rows) + "\n").encode())


if __name__ == "__main__":
    main()
