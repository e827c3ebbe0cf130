"""`benchmarks/results/vllm.md`: the tables of `vllm_serving.py`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import machine

from gracekv.files import write_atomically

ROOM = 96  # tokens that a context leaves for chat format, question and answer


@dataclass(frozen=True)
class Row:
    """Measurements of one context in one way.

    Attributes:
        first: seconds to the first token.
        each: seconds per request.
        tokens: tokens of the prompt, in pages.
        shared: those of them that requests about one context share.
        beside: bytes outside the pages.
    """

    first: float
    each: float
    tokens: int
    shared: int = 0
    beside: int = 0


def write(
    options: argparse.Namespace,
    answer: int,
    rounds: int,
    needles: int,
    found: dict[tuple[int, str], Row],
    answers: dict[str, int],
    size: int,
) -> None:
    """Print the tables, and write them to `options.out`."""
    import vllm

    block_bytes = 2 * 30 * 3 * 64 * 4 * size
    rows = []
    for (length, way), row in sorted(found.items(), key=lambda item: item[0][0]):
        cold, warm = found[length, "cold prefill"], found[length, "prefix caching"]
        blocks = -(-(row.tokens + answer) // size)
        # Whole blocks of the context are held once, and so are entries outside the pages.
        once = row.shared // size * block_bytes
        fit = (2**30 - once - row.beside) // (blocks * block_bytes - once)
        rows.append(
            f"| {length:,} | {way} | {cold.first / row.first:.1f}x | "
            f"{warm.first / row.first:.2f}x | {cold.each / row.each:.1f}x | "
            f"{warm.each / row.each:.2f}x | {blocks} | {fit:,} |"
        )
    notes = [
        f"machine: {machine.cpu()}, {machine.threads()}; {machine.versions()}, "
        f"vLLM {vllm.__version__}",
        f"commit: {machine.commit()}",
        f"SmolLM2-135M-Instruct in float32, vLLM eager, blocks of {size} tokens. Ratios of CPU "
        f"seconds of the engine's process, more is better: to the first token of one request, and "
        f"a request's share of {options.requests} at once about one context (of one alone with "
        f"cold prefill), each a short question and {answer} tokens of answer. Medians of {rounds} "
        f"rounds after one of warming up, once with cold prefill. Cold prefill and prefix "
        f"caching: stock attention over the whole context, which no page holds, or all are held. "
        f"The longest context leaves {ROOM} of the model's positions to chat format, question and "
        f"answer.",
        "Blocks: what a request refers to. Requests in 1 GiB: pages for requests about one "
        "context, and what they share once: pages of the context, or its entries beside them.",
    ]
    lines = [
        "# Serving with vLLM",
        "",
        *(f"- {note}" for note in notes),
        "",
        "| context | engine | first token, against cold | first token, against prefix caching "
        "| requests/s, against cold | requests/s, against prefix caching | KV blocks a request "
        "| requests in 1 GiB |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        "## Answers kept",
        "",
        f"Of {needles} numbers in about 850 tokens, each asked for after compression.",
        "",
        "| cache | found |",
        "|---|--:|",
        *(f"| {way} | {count} |" for way, count in answers.items()),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    write_atomically(options.out, text.encode())
