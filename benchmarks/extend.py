"""The loss of a text that is compressed passage by passage: `benchmarks/results/extend.md`.

    OMP_NUM_THREADS=1 python benchmarks/extend.py

The demo's chapter with ten hidden numbers is compressed at once, and in three and ten passages one
after the other (`extend`), at the same ratios; then one question per number, never known before.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from asked_text import NEW_TOKENS, Reference, facts, fidelity, references, story

import gracekv
from gracekv import CompressionResult, Prompt, PromptSpans, recipes
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "extend.md"
TABLE = """| ratio | way | log KL | first half | second half | numbers | MiB | CPU s |
|--:|---|--:|--:|--:|--:|--:|--:|
"""


def in_passages(model: Any, whole: Prompt, count: int, ratio: float) -> CompressionResult:
    """The context of `whole` in `count` passages, each compressed before the next is read."""
    start, end = whole.spans.context_start, whole.spans.context_end
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    tail = len(whole.ids) - end
    first = dataclasses.replace(
        whole,
        ids=torch.cat([whole.ids[: edges[1]], whole.ids[end:]]),
        spans=PromptSpans(start, edges[1], edges[1], edges[1] + tail),
        parts=None,
    )
    book = gracekv.compress(model, first, ratio=ratio)
    for begin, stop in itertools.pairwise(edges[1:]):
        book = book.extend(whole.ids[begin:stop], ratio=ratio)
    return book


def row(ratio: float, way: str, book: CompressionResult, asked: list[Reference], s: float) -> str:
    scores = [fidelity(book, one) for one in asked]
    logs, half = [score for score, _ in scores], len(scores) // 2
    means = (statistics.mean(x) for x in (logs, logs[:half], logs[half:]))
    found = sum(found for _, found in scores)
    mib = book.accounting.bytes / 2**20
    return (
        f"| {ratio:g} | {way} | {' | '.join(f'{x:.2f}' for x in means)} | {found} of {len(asked)} "
        f"| {mib:.1f} | {s:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--passages", type=int, nargs="+", default=[3, 10])
    parser.add_argument("--ratios", type=float, nargs="+", default=[2, 4])
    args = parser.parse_args()
    model, tokenizer = load_smollm2()
    text, questions = story(tokenizer, args.tokens)
    whole = Prompt.from_chat(tokenizer, context=text)
    full = gracekv.compress(model, whole, ratio=1)
    asked = references(full, text, questions)
    told = sum(one.expected in tokenizer.decode(one.answer) for one in asked)
    rows = []
    for ratio in args.ratios:
        for count in (1, *args.passages):
            started = time.process_time()
            book = in_passages(model, whole, count, ratio)
            way = "one go" if count == 1 else f"{count} passages"
            rows.append(row(ratio, way, book, asked, time.process_time() - started))
            print(rows[-1], flush=True)
    head = [
        "# A text in passages and at once",
        "",
        *facts(),
        f"- config: recipe `{recipes.DEFAULT_WITHOUT_QUESTION}`; a chapter of "
        f"{whole.spans.context_length:,} tokens with ten hidden numbers, one in each tenth; one "
        f"question a number, not known before. FullKV answers {told} of {len(asked)}",
        f"- log KL: mean over the questions of the log of KL(FullKV || method), itself the mean "
        f"over FullKV's own {NEW_TOKENS} tokens; lower is closer. First and second half: of the "
        f"numbers, by their place in the text",
        "- CPU s: of the process, prefill included, one run",
        "",
    ]
    write_atomically(PAGE, ("\n".join(head) + "\n" + TABLE + "\n".join(rows) + "\n").encode())


if __name__ == "__main__":
    main()
