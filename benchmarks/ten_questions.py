"""Ten questions to one context, read once or ten times: `benchmarks/results/ten_questions.md`.

    OMP_NUM_THREADS=1 python benchmarks/ten_questions.py

Compares FullKV with its prefix reused, one context that is compressed without a question, saved,
loaded and asked, and a `compress` call for each question. Times are CPU seconds of the process,
since other work on the machine distorts these less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from asked_text import NEW_TOKENS, facts, fidelity, references, story

import gracekv
from gracekv import CompressionResult, Prompt, recipes
from gracekv.files import write_atomically
from gracekv.hf import detach
from gracekv.hf.smollm2 import load_smollm2

PAGE = Path(__file__).parent / "results" / "ten_questions.md"
TABLE = """| ten answers by | context read | before | answers | in all | log KL | numbers |
|---|--:|--:|--:|--:|--:|--:|
"""
ANSWER = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the process, and the call's return value."""
    started = time.process_time()
    made = call()
    return time.process_time() - started, made


def stock_answers(model: Any, context: int, prompts: list[Prompt]) -> tuple[float, float]:
    """Seconds of one prefill of the first `context` tokens, and of all answers over its cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def prefill() -> None:
        model(prompts[0].ids[None, :context], past_key_values=cache, logits_to_keep=1)

    def answer() -> None:
        for prompt in prompts:
            if extra := cache.get_seq_length() - context:
                cache.crop(-extra)
            model.generate(prompt.ids[None], past_key_values=cache, do_sample=False, **ANSWER)

    detach(model)
    return timed(prefill)[0], timed(answer)[0]


def quality(results: list[CompressionResult], asked: list[Any]) -> str:
    """Columns: mean log KL to FullKV, and how many of the numbers were found."""
    scores = [fidelity(result, one) for result, one in zip(results, asked, strict=True)]
    told = sum(found for _, found in scores)
    return f"{statistics.mean(score for score, _ in scores):.2f} | {told} of {len(scores)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ratio", type=float, default=2)
    parser.add_argument("--apart", type=int, default=2, help="questions with their own call")
    args = parser.parse_args()
    model, tokenizer = load_smollm2()
    text, questions = story(tokenizer, args.tokens)
    whole = Prompt.from_chat(tokenizer, context=text)
    prompts = [Prompt.from_chat(tokenizer, context=text, question=q) for q, _ in questions]
    # Kernels are compiled and loaded before anything is timed.
    gracekv.compress(model, Prompt.from_chat(tokenizer, context=text[:2000]), ratio=2).ask("Who?")
    prefill, answers = stock_answers(model, whole.spans.context_end, prompts)
    print(f"prefill {prefill:.1f} s, ten answers {answers:.1f} s", flush=True)

    made, book = timed(lambda: gracekv.compress(model, whole, ratio=args.ratio))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book.gracekv"
        saved = timed(lambda: book.save(path))[0]
        size = path.stat().st_size
        loaded, book = timed(lambda: gracekv.load(path, model, tokenizer=tokenizer))
    one_by_one = timed(lambda: [book.ask(q, **ANSWER) for q, _ in questions])[0]
    together = timed(lambda: book.ask([q for q, _ in questions], **ANSWER))[0]
    print(f"compress {made:.1f}, save {saved:.2f}, load {loaded:.2f}, ask {one_by_one:.1f}, "
          f"together {together:.1f}", flush=True)  # fmt: skip
    built = [
        timed(lambda p=prompt: gracekv.compress(model, p, ratio=args.ratio))
        for prompt in prompts[: args.apart]
    ]
    said = [timed(lambda r=result: r.generate(**ANSWER))[0] for _, result in built]
    each = len(questions) / args.apart
    building, saying = each * sum(s for s, _ in built), each * sum(said)
    print(f"ten compress calls {building:.1f}, their answers {saying:.1f}", flush=True)

    full = gracekv.compress(model, whole, ratio=1)
    asked = references(full, text, questions)
    alike = quality([book] * len(asked), asked)
    apart = quality([result for _, result in built], asked[: args.apart])
    told = sum(one.expected in tokenizer.decode(one.answer) for one in asked)
    rows = [
        ("FullKV, its prefix reused", "once", prefill, answers, f"– | {told} of {len(asked)}"),
        ("a saved context, loaded and asked", "never", loaded, one_by_one, alike),
        ("the same, all ten as one list", "never", loaded, together, alike),
        ("the same, compressed and saved before", "once", made + saved + loaded, one_by_one, alike),
        (f"ten `compress` calls ({args.apart} measured)", "ten times", building, saying, apart),
    ]  # fmt: skip
    table = [
        f"| {way} | {read} | {before / prefill:.2f} | {after / prefill:.2f} | "
        f"{(before + after) / prefill:.2f} | {rest} |"
        for way, read, before, after, rest in rows
    ]
    asking = (loaded + one_by_one) / (prefill + answers)
    head = [
        "# Ten questions to one context",
        "",
        *facts(),
        f"- config: `{recipes.DEFAULT_WITHOUT_QUESTION}` for the saved context, "
        f"`{recipes.DEFAULT}` for the calls with a question, ratio {args.ratio:g}; a context of "
        f"{whole.spans.context_length:,} tokens with ten hidden numbers, a question for each, "
        f"answers of {NEW_TOKENS} tokens; the file has {size / 2**20:.1f} MiB",
        f"- times in units of one prefill of the context ({prefill:.1f} CPU seconds), from one run "
        f"side by side: read them as ratios",
        "- log KL: mean of the log of KL(FullKV || method) over FullKV's own tokens; lower is "
        "closer. Numbers: how many of the hidden numbers are in the answers",
        "",
    ]
    end = [
        "",
        f"Ten questions to the saved context take {asking:.2f} of the time of one prefill and ten "
        f"answers of FullKV.",
    ]
    write_atomically(
        PAGE, ("\n".join(head) + "\n" + TABLE + "\n".join([*table, *end]) + "\n").encode()
    )


if __name__ == "__main__":
    main()
