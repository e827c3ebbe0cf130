"""Memory of a vLLM engine over thousands of turns. Writes `results/vllm_memory.md`.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_memory.py

Needs the environment of `make test-vllm`. Four conversations at once: all ask about their contexts
and extend them, in one batch, under a limit, by passages of random length into new contexts; the
old ones are deleted. The model is small and random, and the engine runs in this process, whose
resident memory is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import RESULTS, commit, cpu, threads, versions
from vllm_compress import _is_making, parameters

from gracekv.files import write_atomically
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from gracekv.vllm import kv_transfer_config

TALKS, LIMIT = 4, {"entries_per_head": 150, "every": 64, "window": 8}
ROWS = 10


def resident() -> int:
    """Resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def wait(llm: Any) -> None:
    while any(llm.collective_rpc(_is_making)):
        llm.llm_engine.engine_core.get_output()


def turn(llm: Any, number: int, draw: random.Random) -> None:
    """All conversations ask and are extended, in one batch, and drop their old contexts."""
    asked: list[dict[str, Any]] = []
    orders: list[Any] = []
    for talk in range(TALKS):
        name = f"talk{talk}.{number}"
        ids = [draw.randrange(5, 400) for _ in range(draw.randint(40, 90))]
        asked += [{"prompt_token_ids": ids[:12]}, {"prompt_token_ids": ids}]
        order = {"name": name, "into": f"talk{talk}.{number + 1}", "ratio": 2, "limit": LIMIT}
        orders += [parameters(name, 8), parameters({"extend": order})]
    llm.generate(asked, orders, use_tqdm=False)
    wait(llm)
    drop = [parameters({"delete": f"talk{talk}.{number}"}) for talk in range(TALKS)]
    llm.generate([{"prompt_token_ids": [0]}] * TALKS, drop, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000, help="of all conversations together")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so many")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_memory.md")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the functions of collective_rpc
    from vllm import LLM
    from vllm.config import KVTransferConfig

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "store").mkdir()
        tiny_llama(vocabulary=500, dim=32).save_pretrained(root / "model")
        tiny_tokenizer(vocabulary=500).save_pretrained(root / "model")
        llm = LLM(
            str(root / "model"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            hf_overrides={"max_position_embeddings": 10_000_000},
            kv_transfer_config=KVTransferConfig(**kv_transfer_config(root / "store")),
        )
        draw, lines = random.Random(0), []
        for talk in range(TALKS):
            made = {"compress": {"name": f"talk{talk}.0", "ratio": 2}}
            prompt = {"prompt_token_ids": [draw.randrange(5, 400) for _ in range(300)]}
            llm.generate(prompt, parameters(made), use_tqdm=False)
            wait(llm)
        begun, every = time.monotonic(), max(1, options.turns // TALKS // ROWS)
        for number in range(options.turns // TALKS):
            turn(llm, number, draw)
            done, late = number + 1, time.monotonic() - begun > options.seconds
            if done % every == 0 or done in (1, 10, 50) or late:
                seconds = time.monotonic() - begun
                lines.append(f"| {done * TALKS:,} | {resident():,} | {seconds:.0f} |")
                print(lines[-1], flush=True)
            if late:
                break
        llm.llm_engine.engine_core.shutdown()
    head = (
        f"# Memory of a vLLM engine over turns\n\n- machine: {cpu()}, {threads()}; {versions()}\n"
        f"- commit: {commit()}\n"
        f"- A random model of 2 layers; {TALKS} conversations at once; each turn asks and extends "
        f"under a limit of {LIMIT['entries_per_head']} entries a head.\n\n"
        "| turns | resident memory, MiB | seconds |\n|--:|--:|--:|\n"
    )
    write_atomically(options.out, (head + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
