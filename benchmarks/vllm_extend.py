"""The cost of extending a context in vLLM. Prints tables and writes `results/vllm_extend.md`.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_extend.py

Needs the environment of `make test-vllm`. An extension and a plain request take turns reading the
same passage over the same context; `vllm_compress.py` explains the measurements. Medians are over
rounds; latencies are over all rounds together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, commit, cpu, threads, versions
from vllm_compress import RATIO, TOKENS, cells, cost, engine, gaps, story

from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2

ASKED = "book"


def row(llm: Any, tokenizer: Any, context: int, passage: int, options: Any) -> str:
    """A passage's row, after `context` tokens."""
    recipe = {"ratio": RATIO, "recipe": options.recipe}
    cost(
        llm,
        {"prompt_token_ids": story(tokenizer, context)},
        {"compress": {"name": "book"} | recipe},
    )
    order = {"extend": {"name": "book", "into": "longer"} | recipe}
    ways = {"plain": ASKED, "extended": order}
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    beside: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        ids = story(tokenizer, context + passage)[context:]
        ids[0] = 100 + number  # so that no page holds it
        for way, asked in list(ways.items())[:: 1 if number % 2 else -1]:
            salt = f"{context} {passage} {way}{number}"
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            spent = cost(llm, prompt, asked)
            seen = gaps(llm, prompt | {"cache_salt": f"{salt} again"}, asked)
            if number:  # The first round compiles and loads.
                taken[way].append(spent)
                beside[way] += seen
    (plain, used), (made, more) = (
        map(statistics.median, zip(*x, strict=True)) for x in taken.values()
    )
    ratios = [b[0] / a[0] for a, b in zip(*taken.values(), strict=True)]
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})"
    columns = cells((plain, made), (used, more), beside.values(), spread)
    return f"| {context:,} | {passage:,} {columns}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--passages", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="gracekv-agnostic")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_extend.md")
    options = parser.parse_args()
    _, tokenizer = load_smollm2()
    with tempfile.TemporaryDirectory() as store:
        llm = engine(tokenizer, options.context + max(options.passages), store)
        lines = []
        for passage in options.passages:
            lines.append(row(llm, tokenizer, options.context, passage, options))
            print(lines[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
    head = (
        f"# Extending a context in vLLM\n\n- machine: {cpu()}, {threads()}; {versions()}\n"
        f"- commit: {commit()}\n"
        f"- SmolLM2-135M-Instruct in float32, `{options.recipe}` at {RATIO}x, chunks of 1,024 "
        f"tokens; medians of {options.rounds} rounds, which take turns\n"
        f"- Extended: from the request to the longer context, by the clock; plain: a request for "
        f"the same passage about the same context. CPU seconds are those of the engine's process, "
        f"all threads together. Latencies: 99th percentile of {TOKENS} tokens per round of a "
        f"request that runs meanwhile.\n\n"
        "| context | passage | plain, s | extended, s | ratio of s (rounds) | plain, CPU s "
        "| extended, CPU s | ratio of CPU s | latency beside a plain request, ms "
        "| beside an extension, ms | ratio of latencies |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    write_atomically(options.out, (head + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
