"""The gain from compressed contexts in vLLM. Prints tables and writes `benchmarks/results/vllm.md`.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_serving.py

Needs the environment of `make test-vllm`. One engine alternates between stock attention, for
prompts with the whole context, and ours. Times are CPU seconds of the engine's process on one
thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from machine import RESULTS
from vllm_page import ROOM, Row, write

import gracekv
from gracekv.hf.smollm2 import load_smollm2
from gracekv.vllm import ContextStore, export, kv_transfer_config, request

QUESTION = "Who is the story about, and what happens to her first?"
ANSWER = 16  # tokens
ROUNDS = 3
NEEDLES = {
    "Paris": "4817263", "Lima": "9052746", "Oslo": "3361908", "Cairo": "7724150",
    "Delhi": "6183947", "Quito": "2590481",
}  # fmt: skip
RECIPE = "gracekv-agnostic"
# Name in the tables, ratio.
WAYS = (("ragged 2x", 2), ("ragged 4x", 4))


def compress(model: Any, prompt: Any, store: Path, name: str) -> None:
    """Write the prompt's contexts to the store, unless they exist."""
    if all((store / _key(name, way) / "header.json").is_file() for way, *_ in WAYS):
        return
    prefill = gracekv.capture(model, prompt, gracekv.Pipeline.named(RECIPE).needs())
    for way, ratio in WAYS:
        made = gracekv.compress(model, prompt, prefill=prefill, ratio=ratio, pipeline=RECIPE)
        export(made, store / _key(name, way))


def _key(name: str, way: str) -> str:
    return f"{name}-{way.replace(' ', '-')}"


def story(tokenizer: Any, length: int) -> str:
    """A text of `length` tokens."""
    text = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    ids = tokenizer(text * (1 + length // 2000), truncation=True, max_length=length).input_ids
    return tokenizer.decode(ids)


def hidden(text: str, number: int, city: str) -> str:
    """`text` with the number of a city somewhere in it."""
    paragraphs = text.split("\n\n")
    place = (number + 1) * len(paragraphs) // (len(NEEDLES) + 1)
    told = f"The special number of {city} is {NEEDLES[city]}."
    return "\n\n".join([*paragraphs[:place], told, *paragraphs[place:]])


def asks_for(city: str) -> str:
    return f"What is the special number of {city}?"


def holds(city: str, answer: str) -> bool:
    return NEEDLES[city] in answer.replace(",", "")


def engine(folder: str, options: argparse.Namespace, store: Path) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(options.lengths) + ROOM,
        max_num_seqs=options.requests,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(store)),
    )


def _cpu_seconds(worker: Any) -> float:
    return time.process_time()


def seconds(llm: Any, prompts: list[dict[str, Any]], params: Any) -> float:
    """CPU seconds of the engine's process for all prompts at once."""
    (before,) = llm.collective_rpc(_cpu_seconds)
    llm.generate(prompts, params, use_tqdm=False)
    (after,) = llm.collective_rpc(_cpu_seconds)
    return after - before


def parameters(tokens: int, extra: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)


def cold(llm: Any, prompt: dict[str, Any]) -> dict[str, float]:
    """Seconds to the first and to the last token of a prompt that no page holds."""
    # Every context begins with the shorter ones.
    length = len(prompt["prompt_token_ids"])
    first, each = ({**prompt, "cache_salt": f"{length} {name}"} for name in ("first", "each"))
    return {
        "first": seconds(llm, [first], parameters(1)),
        "each": seconds(llm, [each], parameters(ANSWER)),
    }


def warm(
    llm: Any, prompt: dict[str, Any], count: int, extra: dict[str, Any] | None = None
) -> dict[str, float]:
    """Seconds to the first token of one request, and for each of `count` requests at once.

    Medians of rounds; the first one warms up.
    """

    def run(requests: int, tokens: int) -> float:
        return seconds(llm, [prompt] * requests, parameters(tokens, extra)) / requests

    taken = [(run(1, 1), run(count, ANSWER)) for _ in range(ROUNDS + 1)][1:]
    first, each = zip(*taken, strict=True)
    return {"first": statistics.median(first), "each": statistics.median(each)}


def _take_stock(worker: Any) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from gracekv.vllm.backend import GraceCPUAttentionImpl as ours

    ours.forward = CPUAttentionBackendImpl.forward


def _take_ours(worker: Any) -> None:
    from gracekv.vllm.backend import GraceCPUAttentionImpl as ours

    del ours.forward  # uncovers the inherited one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--store", type=Path, help="where contexts stay between runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm.md")
    options = parser.parse_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the functions of collective_rpc
    with tempfile.TemporaryDirectory() as scratch:
        run(options, options.store or Path(scratch))


def run(options: argparse.Namespace, store: Path) -> None:
    model, tokenizer = load_smollm2()
    most = model.config.max_position_embeddings - ROOM
    options.lengths = [min(length, most) for length in options.lengths]
    prompts = {}
    for length in options.lengths:
        text = story(tokenizer, length)
        prompts[f"c{length}"] = gracekv.Prompt.from_chat(tokenizer, context=text)
    for number, city in enumerate(NEEDLES):
        text = hidden(story(tokenizer, 800), number, city)
        prompts[city] = gracekv.Prompt.from_chat(tokenizer, context=text)
    for name, prompt in prompts.items():
        compress(model, prompt, store, name)
    del model

    def whole(name: str, question: str) -> list[int]:
        asked = request(store, _key(name, WAYS[0][0]), question, tokenizer)
        context = prompts[name].ids[: prompts[name].spans.context_end].tolist()
        return [*context, *asked.prompt_ids]

    llm = engine(tokenizer.name_or_path, options, store)
    found: dict[tuple[int, str], Row] = {}
    llm.collective_rpc(_take_stock)
    for length in options.lengths:
        prompt = {"prompt_token_ids": whole(f"c{length}", QUESTION)}
        tokens = len(prompt["prompt_token_ids"])
        shared = prompts[f"c{length}"].spans.context_end
        found[length, "cold prefill"] = Row(**cold(llm, prompt), tokens=tokens)
        taken = warm(llm, prompt, options.requests)
        found[length, "prefix caching"] = Row(**taken, tokens=tokens, shared=shared)
    asked = [{"prompt_token_ids": whole(city, asks_for(city))} for city in NEEDLES]
    texts = [made.outputs[0].text for made in llm.generate(asked, parameters(24), use_tqdm=False)]
    answers = {"full cache": sum(map(holds, NEEDLES, texts))}

    llm.collective_rpc(_take_ours)
    contexts = ContextStore(store)
    for length, (way, *_) in itertools.product(options.lengths, WAYS):
        about = request(store, _key(f"c{length}", way), QUESTION, tokenizer)
        taken = warm(llm, about.prompt, options.requests, about.extra_args)
        beside = contexts.header(about.context).bytes
        found[length, way] = Row(**taken, tokens=len(about.prompt_ids), beside=beside)
    for way, *_ in WAYS:
        answers[way] = 0
        for city in NEEDLES:
            about = request(store, _key(city, way), asks_for(city), tokenizer)
            params = parameters(24, about.extra_args)
            (made,) = llm.generate(about.prompt, params, use_tqdm=False)
            answers[way] += holds(city, made.outputs[0].text)
    size = llm.llm_engine.vllm_config.cache_config.block_size
    llm.llm_engine.engine_core.shutdown()
    write(options, ANSWER, ROUNDS, len(NEEDLES), found, answers, size)


if __name__ == "__main__":
    main()
