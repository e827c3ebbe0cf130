"""The cost of the plugin for requests without contexts. Writes `benchmarks/results/vllm-plugin.md`.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_plugin_cost.py

Needs the environment of `make test-vllm`. One engine, in this process, on one thread, decodes plain
requests. Its steps run in triples, in random order: with vLLM's own attention, with ours, and with
ours and the connector, so that other work on the machine affects all three alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, commit, cpu, threads, versions

from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2
from gracekv.vllm import kv_transfer_config

STOCK, ATTENTION, PLUGIN = "stock", "our attention", "and the connector"
WAYS = (STOCK, ATTENTION, PLUGIN)
THREES = 250  # of steps, before the requests start over
WARM = 12  # steps: the prefill, and one-time initialisation
RESAMPLES = 2000


class Switch:
    """Runs an engine's next step in one of `WAYS`.

    Args:
        engine: in this process, with the plugin and the connector.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._scheduler = engine.engine_core.engine_core.scheduler
        self._state = kv_transfer_state
        self.scheduler_side = self._scheduler.connector
        self.worker_side = kv_transfer_state.get_kv_transfer_group()
        layers = engine.vllm_config.compilation_config.static_forward_context.values()
        self.impls = [layer.impl for layer in layers if hasattr(layer, "impl")]

    def take(self, way: str) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        from gracekv.vllm.backend import GraceCPUAttentionImpl

        kind = CPUAttentionBackendImpl if way == STOCK else GraceCPUAttentionImpl
        for impl in self.impls:
            impl.__class__ = kind
        connected = way == PLUGIN
        self._scheduler.connector = self.scheduler_side if connected else None
        self._state._KV_CONNECTOR_AGENT = self.worker_side if connected else None


def start(engine: Any, ids: list[int], count: int) -> None:
    """Let the engine decode `count` plain requests, past the warm-up steps."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=3 * THREES + 2 * WARM, ignore_eos=True)
    for number in range(count):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    for _ in range(WARM):
        engine.step()


def stop(engine: Any, switch: Switch, count: int) -> None:
    switch.take(PLUGIN)
    engine.abort_request([str(number) for number in range(count)])
    while engine.has_unfinished_requests():
        engine.step()


def step_times(engine: Any, switch: Switch, ids: list[int], count: int, threes: int) -> np.ndarray:
    """CPU seconds of a step in each of `WAYS`: float64 [threes, 3]."""
    random = np.random.default_rng(0)
    taken = np.empty((threes, len(WAYS)))
    for number in range(threes):
        if number % THREES == 0:
            stop(engine, switch, count)
            start(engine, ids, count)
        for way in random.permutation(len(WAYS)):
            switch.take(WAYS[way])
            before = time.process_time_ns()
            engine.step()
            taken[number, way] = (time.process_time_ns() - before) / 1e9
    stop(engine, switch, count)
    return taken


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """The median, and its 95 % bootstrap interval over threes."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.quantile(np.median(differences[drawn], axis=1), [0.025, 0.975])
    return float(np.median(differences)), float(low), float(high)


def connector_seconds(engine: Any, switch: Switch, ids: list[int], count: int) -> float:
    """Median seconds that a step spends in the connector's methods, our own and inherited."""
    spent = [0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter_ns() - before

        return run

    sides = (switch.scheduler_side, switch.worker_side)
    names = [name for name in dir(type(sides[0])) if not name.startswith("_")]
    start(engine, ids, count)
    for side in sides:
        for name in names:
            if callable(getattr(side, name)):
                setattr(side, name, timed(getattr(side, name)))
    steps = []
    for _ in range(THREES):
        spent[0] = 0
        engine.step()
        steps.append(spent[0] / 1e9)
    for side in sides:
        for name in names:
            vars(side).pop(name, None)
    stop(engine, switch, count)
    return float(np.median(steps))


def attention_seconds(layers: int, count: int = 20_000) -> float:
    """Seconds that our `forward` adds to a step, on top of the stock one."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as stock

    from gracekv.vllm.backend import GraceCPUAttentionImpl as ours

    kept, stock.forward = stock.forward, lambda self, *args: args[-3]
    try:
        impl, taken = object.__new__(ours), {}
        for made in (ours, stock, ours, stock):
            before = time.process_time()
            for _ in range(count):
                made.forward(impl, None, None, None, None, None, impl, None, None, None)
            taken[made] = time.process_time() - before
    finally:
        stock.forward = kept
    return layers * (taken[ours] - taken[stock]) / count


def engine_here(folder: str, store: str, requests: int) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        async_scheduling=False,
        max_model_len=1024,
        max_num_seqs=requests,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(store)),
    ).llm_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threes", type=int, default=1000, help="of steps, for each number")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm-plugin.md")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tokenizer = load_smollm2()[1]
    text = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    ids = tokenizer(text).input_ids[:64]
    rows = []
    with tempfile.TemporaryDirectory() as store:
        engine = engine_here(tokenizer.name_or_path, store, max(options.requests))
        switch = Switch(engine)
        calls = attention_seconds(len(switch.impls))
        for count in options.requests:
            taken = step_times(engine, switch, ids, count, options.threes)
            stock = taken[:, 0]
            cells = [f"{1000 * np.median(stock):.1f} ms"]
            for way in (1, 2):
                found = interval(taken[:, way] / stock - 1)
                cells.append("{:+.2%} [{:+.2%}, {:+.2%}]".format(*found))
            connector = connector_seconds(engine, switch, ids, count)
            cells += [f"{1e6 * calls:.0f} µs", f"{1e6 * connector:.0f} µs"]
            rows.append(f"| {count} | " + " | ".join(cells) + " |")
    lines = [
        "# What the plugin costs plain requests",
        "",
        f"- machine: {cpu()}, {threads()}; {versions()}",
        f"- commit: {commit()}",
        f"- One engine decodes plain requests of SmolLM2-135M-Instruct in float32; of each three "
        f"steps one runs with vLLM's attention, one with ours, one with ours and the connector, in "
        f"random order; CPU time of the whole step, {options.threes:,} threes a row: median "
        f"difference to the stock step of the same three, with its 95 % bootstrap interval. By "
        f"calls alone: what our `forward` adds in all layers, and what a step spends in the "
        f"connector's methods, timers included; vLLM's own bookkeeping for connectors is in the "
        f"steps alone.",
        "",
        "| requests | a stock step | with our attention | and with the connector "
        "| attention's calls | connector's calls |",
        "|--:|--:|--:|--:|--:|--:|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    write_atomically(options.out, text.encode())
    print(text)


if __name__ == "__main__":
    main()
