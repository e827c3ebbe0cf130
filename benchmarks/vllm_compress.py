"""The cost of compressing in vLLM. Prints a table and writes `results/vllm_compress.md`.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_compress.py

Needs the environment of `make test-vllm`. Costs are wall seconds from the request to the stored
context, with one engine thread next to the observers' own; and CPU seconds of the engine's process,
all threads together. Inter-token latency is that of a request that runs while a document is
prefilled, or also compressed; the rounds of both take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from machine import RESULTS, commit, cpu, threads, versions

from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2
from gracekv.vllm import kv_transfer_config

TOKENS = 200  # of the concurrent request
RATIO = 4


def _cpu_seconds(worker: Any) -> float:
    return time.process_time()


def _is_making(worker: Any) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._compressor._job is not None


def parameters(order: Any, tokens: int = 1) -> Any:
    from vllm import SamplingParams

    extra = None if order is None else {"kv_transfer_params": {"gracekv": order}}
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)


def wait(llm: Any) -> None:
    while any(llm.collective_rpc(_is_making)):
        time.sleep(0.05)


def cost(llm: Any, prompt: dict[str, Any], order: Any) -> tuple[float, float]:
    """Seconds and CPU seconds from a document's request until its context is stored."""
    (before,), start = llm.collective_rpc(_cpu_seconds), time.perf_counter()
    llm.generate(prompt, parameters(order), use_tqdm=False)
    wait(llm)
    (after,), end = llm.collective_rpc(_cpu_seconds), time.perf_counter()
    return end - start, after - before


def gaps(llm: Any, prompt: dict[str, Any], order: Any) -> list[float]:
    """Seconds between the tokens of a request that runs alongside a document."""
    core, seen, last = llm.llm_engine, [], 0.0
    core.add_request("beside", {"prompt_token_ids": [5, 6, 7]}, parameters(None, TOKENS))
    for _ in range(8):
        core.step()
    core.add_request("document", prompt, parameters(order))
    last = time.perf_counter()
    while core.has_unfinished_requests():
        for output in core.step():
            if output.request_id.startswith("beside"):
                now = time.perf_counter()
                seen.append(now - last)
                last = now
    wait(llm)
    return seen


def story(tokenizer: Any, length: int) -> list[int]:
    text = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    return list(tokenizer(text * (1 + length // 2000)).input_ids[:length])


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def rows(llm: Any, tokenizer: Any, options: argparse.Namespace) -> list[str]:
    order = {"compress": {"name": "book", "ratio": RATIO, "recipe": options.recipe}}
    cost(llm, {"prompt_token_ids": story(tokenizer, 300)}, order)  # compiles, loads
    lines = []
    for length in options.lengths:
        taken: dict[str, list[tuple[float, float]]] = {"plain": [], "made": []}
        beside: dict[str, list[float]] = {"plain": [], "made": []}
        for number in range(options.rounds):
            ids = story(tokenizer, length)
            for way, asked in (("plain", None), ("made", order)):
                # So that neither its pages nor those of a shorter document are reused.
                salt = f"{length} {way}{number}"
                prompt = {"prompt_token_ids": ids, "cache_salt": salt}
                taken[way].append(cost(llm, prompt, asked))
                again = {"prompt_token_ids": ids, "cache_salt": f"{salt} again"}
                beside[way] += gaps(llm, again, asked)
        (plain, used), (made, more) = (map(min, zip(*x, strict=True)) for x in taken.values())
        lines.append(f"| {length:,} {cells((plain, made), (used, more), beside.values())}")
        print(lines[-1], flush=True)
    return lines


def cells(
    seconds: tuple[float, float],
    cpu_seconds: tuple[float, float],
    gaps: Iterable[list[float]],
    spread: str = "",
) -> str:
    """A plain request and the measured one: seconds, CPU seconds, latencies, and ratios."""
    (plain, made), (used, more), (slow, slower) = seconds, cpu_seconds, map(p99, gaps)
    return (
        f"| {plain:.2f} | {made:.2f} | {made / plain:.2f}{spread} "
        f"| {used:.2f} | {more:.2f} | {more / used:.2f} "
        f"| {1e3 * slow:.0f} | {1e3 * slower:.0f} | {slower / slow:.2f} |"
    )


def engine(tokenizer: Any, longest: int, store: str) -> Any:
    """vLLM with room for the longest request and its answer; contexts are in `store`."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the functions of collective_rpc
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        tokenizer.name_or_path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest + 192,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(store)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recipe", default="gracekv-agnostic")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_compress.md")
    options = parser.parse_args()
    _, tokenizer = load_smollm2()
    with tempfile.TemporaryDirectory() as store:
        llm = engine(tokenizer, max(options.lengths), store)
        lines = rows(llm, tokenizer, options)
        llm.llm_engine.engine_core.shutdown()
    head = (
        f"# Compressing in vLLM\n\n- machine: {cpu()}, {threads()}; {versions()}\n"
        f"- commit: {commit()}\n"
        f"- SmolLM2-135M-Instruct in float32, `{options.recipe}` at {RATIO}x, "
        f"chunks of 1,024 tokens; {options.rounds} round(s), of which the fastest counts\n"
        f"- Stored: from the request to the stored context, by the clock; prefill: a plain "
        f"request. CPU seconds are those of the engine's process, all threads together. "
        f"Latencies: 99th percentile of {TOKENS} tokens of a request that runs meanwhile.\n\n"
        "| tokens | prefill, s | stored, s | ratio of s | prefill, CPU s | stored, CPU s "
        "| ratio of CPU s | latency beside a prefill, ms | beside a compression, ms "
        "| ratio of latencies |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    write_atomically(options.out, (head + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
