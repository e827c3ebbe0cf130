"""How much does the greedy auction leave on the table, and does a better one change answers?

Real captures of SmolLM2-135M-Instruct. Prints tables and writes
`benchmarks/results/allocation_quality.md`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from gracekv import Budget, CompressionResult, Pipeline, Prefill, Prompt, capture
from gracekv.allocate import Frontier, Lagrangian, Selection, upper_bound
from gracekv.cache import RaggedCache
from gracekv.files import write_atomically
from gracekv.hf import GraceCache, attach
from gracekv.hf.smollm2 import load_smollm2

Rows = list[list[str]]

RATIOS = (4, 8, 16, 32, 64)
TOKENS = 16
CONTEXT_CHARS = 4_000
# Trees pruned for the greedy auction would hide from the bound what it misses.
COMMON = {"window": {"share": 0.5}, "prune": False}
PIPELINES = {
    "floor": Pipeline.from_dict(COMMON),
    "no floor": Pipeline.from_dict({**COMMON, "floor": "none"}),
}
VARIANTS = tuple(f"{name}, {floor}" for floor in PIPELINES for name in ("greedy", "lagrangian"))
PAIRS = (
    ("lagrangian, floor", "greedy, floor"),
    ("lagrangian, no floor", "greedy, no floor"),
    ("greedy, no floor", "greedy, floor"),
    ("lagrangian, no floor", "greedy, floor"),
)
ALICE = (
    (2, "What did the Rabbit take out of its waistcoat-pocket?", "watch"),
    (8, "What is the name of Alice's cat?", "Dinah"),
    (13, "What opened the little door behind the curtain?", "golden key"),
    (15, "What are the words on the paper label of the little bottle? Quote them.", "DRINK ME"),
)
CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Delhi", "Tunis", "Sofia", "Hanoi")
SUBJECTS = ("The ferry", "A neighbour", "The old mill", "Our teacher", "The market", "A clerk")
DEEDS = ("waited for the rain to stop", "stood beside the river", "had seen better days")
ENDINGS = ("and nobody minded.", "before the bells rang.", "as the papers said.", "once again.")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A prompt, and words that a right answer holds."""

    name: str
    prompt: Prompt
    expected: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant on one prompt at one ratio.

    `utility` is the auction's measure (gains clipped at 0), `raw` counts losses too, `bound` is
    the forest's from the empty start, `own` the one from this variant's start. `kl` in nats and
    `agree` are means over the answer's tokens; `same`: every token's argmax is FullKV's.
    """

    prompt: str
    ratio: int
    variant: str
    utility: float
    raw: float
    bound: float
    own: float
    kl: float
    agree: float
    same: bool


def needle_case(tokenizer: Any, seed: int) -> Case:
    rng = random.Random(seed)
    cities = rng.sample(CITIES, 4)
    numbers = [str(rng.randrange(100_000, 1_000_000)) for _ in cities]
    text: list[str] = []
    while sum(map(len, text)) < CONTEXT_CHARS:
        text.append(f"{rng.choice(SUBJECTS)} {rng.choice(DEEDS)} {rng.choice(ENDINGS)}")
    # The needles lie in quarters of the text, so that depth varies with the one asked.
    for quarter in reversed(range(4)):
        place = rng.randrange(len(text) * quarter // 4, len(text) * (quarter + 1) // 4)
        needle = f"The special magic number for {cities[quarter]} is {numbers[quarter]}."
        text.insert(place, needle)
    asked = seed % 4
    prompt = Prompt.from_chat(
        tokenizer,
        instruction="Some special magic numbers are hidden in the text. Remember them.",
        context=" ".join(text),
        question=f"What is the special magic number for {cities[asked]} in the text?",
        answer_prefix=f"The special magic number for {cities[asked]} is",
    )
    return Case(f"needle {seed}", prompt, numbers[asked])


def alice_case(tokenizer: Any, first: int, question: str, expected: str) -> Case:
    document = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    window = ""
    for paragraph in document.split("\n\n")[first:]:
        if len(window) >= CONTEXT_CHARS:
            break
        window += paragraph + "\n\n"
    if expected not in window:
        raise SystemExit(f"The window from paragraph {first} does not hold {expected!r}.")
    told = "Read the story and answer the question."
    prompt = Prompt.from_chat(
        tokenizer, context=window.strip(), question=question, instruction=told
    )
    return Case(f"alice {first}", prompt, expected)


@torch.no_grad()
def log_probs(model: Any, cache: RaggedCache, tokens: Tensor) -> Tensor:
    """[n, vocab] float64, of each next token after the prompt and after `tokens[:i]`.

    `tokens` [n] starts with the prompt's last token: the cache covers all before it.
    """
    output = model(tokens[None], past_key_values=GraceCache(cache))
    result: Tensor = output.logits[0].double().log_softmax(-1)
    return result


def reference(model: Any, case: Case, prefill: Prefill) -> tuple[Tensor, Tensor, str]:
    """The tokens to feed [n], FullKV's log-probabilities after each, and its answer's text."""
    run = Pipeline.named("fullkv").run(prefill, Budget.ratio(1))
    full = CompressionResult.from_runs(model, [case.prompt], [run], Pipeline.named("fullkv"))
    answer = full.generate_ids(TOKENS)[0]
    tokens = torch.cat([case.prompt.ids[-1:], answer[:-1]])
    text = case.prompt.tokenizer.decode(answer, skip_special_tokens=True).strip()
    return tokens, log_probs(model, run.cache, tokens), text


def cells(
    model: Any, case: Case, prefill: Prefill, ratio: int, fed: Tensor, full: Tensor
) -> Iterator[Cell]:
    """The variants' cells at one ratio; both allocators see the same forest and start."""
    for floor, pipeline in PIPELINES.items():
        run = pipeline.run(prefill, Budget.ratio(ratio))
        if run.forest is None or run.relevance is None or run.frontier is None:
            raise SystemExit(f"{case.name} is so short that nothing is compressed at {ratio}x")
        tokens = run.relevance.scores
        candidates = pipeline.floor.candidates(tokens, run.plan)
        start = pipeline.floor.realize(run.forest, candidates, run.plan, None)
        bound, own = upper_bound(Frontier.empty(run.forest, run.plan.base)), upper_bound(start)
        priced = Lagrangian()(start, None)
        chosen = Selection.of_frontier(priced)
        packed = pipeline.pack(prefill, chosen, tokens, pipeline.prototype)
        both = (("greedy", run.frontier, run.cache), ("lagrangian", priced, packed))
        for name, frontier, cache in both:
            if frontier.spent != run.plan.base:
                raise SystemExit(f"{name} left budget unspent: the comparison would be unequal")
            ours = log_probs(model, cache, fed)
            kl = (full.exp() * (full - ours)).sum(-1)
            hits = full.argmax(-1) == ours.argmax(-1)
            yield Cell(
                case.name, ratio, f"{name}, {floor}", frontier.utility, raw_utility(frontier),
                bound, own, float(kl.mean()), float(hits.double().mean()), bool(hits.all()),
            )  # fmt: skip


def raw_utility(frontier: Frontier) -> float:
    """Gains of all executed operations, losses counted as losses."""
    forest = frontier.forest
    added = forest.add_gain[frontier.added].sum()
    return float(added + forest.split_gain[frontier.split].sum())


def tables(done: list[Cell]) -> dict[str, Rows]:
    """Title to rows; the first row is the head."""
    of = {(c.prompt, c.ratio, c.variant): c for c in done}
    prompts = list(dict.fromkeys(c.prompt for c in done))
    quality: Rows = [["ratio", *(f"{v}: utility / bound" for v in VARIANTS)]]
    losses: Rows = [["ratio", *(f"{v}: raw / bound" for v in VARIANTS)]]
    answers: Rows = [["ratio", "variant", "KL, nats", "worst prompt", "top-1", "same answer"]]
    pairs: Rows = [["KL of", "minus KL of", *(f"{ratio}x" for ratio in RATIOS)]]
    for ratio in RATIOS:
        per = {v: [of[p, ratio, v] for p in prompts] for v in VARIANTS}

        def spread(numbers: list[float]) -> str:
            return f"{statistics.fmean(numbers):.3f} ({min(numbers):.3f})"

        label = f"{ratio}x"
        quality.append([label, *(spread([c.utility / c.bound for c in per[v]]) for v in VARIANTS)])
        losses.append([label, *(spread([c.raw / c.bound for c in per[v]]) for v in VARIANTS)])
        for v in VARIANTS:
            kl = [c.kl for c in per[v]]
            answers.append([
                label, v, f"{statistics.fmean(kl):.3f}", f"{max(kl):.3f}",
                f"{statistics.fmean(c.agree for c in per[v]):.1%}",
                f"{sum(c.same for c in per[v])}/{len(prompts)}",
            ])  # fmt: skip
    for left, right in PAIRS:
        row = [left, right]
        for ratio in RATIOS:
            gap = [of[p, ratio, left].kl - of[p, ratio, right].kl for p in prompts]
            mean, error = statistics.fmean(gap), statistics.stdev(gap) / len(gap) ** 0.5
            wins = f"lower in {sum(x < 0 for x in gap)}/{len(gap)}"
            row.append(f"{mean:+.3f} ± {error:.3f}, {wins}")
        pairs.append(row)
    return {
        "Utility as a share of the bound: mean (least) over prompts": quality,
        "Share of the bound if losing operations count as losses": losses,
        "Answers against FullKV's": answers,
        "Paired differences of KL: mean ± standard error over prompts": pairs,
    }


def header(seconds: float, facts: list[str]) -> list[str]:
    return [
        f"machine: {machine.threads()}; {machine.versions()}; {seconds:.0f} s in all",
        f"commit: {machine.commit()}",
        "model: SmolLM2-135M-Instruct, float32",
        f"config: {PIPELINES['floor']!r}; no floor: {PIPELINES['no floor'].floor!r}; "
        f"lagrangian: {Lagrangian()!r}",
        f"Answers: FullKV's greedy continuation, at most {TOKENS} tokens, is fed to every cache "
        f"after the prompt's last token; KL is from FullKV's distribution to the variant's.",
        "The bound is that of the same forest from the empty start.",
        *facts,
    ]


def markdown(lines: list[str], made: dict[str, Rows]) -> str:
    text = ["# How good is the auction?", "", *(f"- {line}" for line in lines)]
    for title, (head, *body) in made.items():
        text += ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        text += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    model, tokenizer = load_smollm2()
    cases = [alice_case(tokenizer, *window) for window in ALICE]
    cases += [needle_case(tokenizer, seed) for seed in range(4)]
    console, facts = Console(width=180), []
    done: list[Cell] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(cases) * len(RATIOS))
        for case in cases:
            progress.update(bar, description=case.name)
            prefill = capture(model, case.prompt, PIPELINES["floor"].needs())
            attach(model)
            fed, full, text = reference(model, case, prefill)
            right = "right" if case.expected.lower() in text.lower() else "wrong"
            facts.append(
                f"{case.name}: {len(case.prompt.ids):,} tokens, {len(fed)} answered; FullKV "
                f"({right}): {' '.join(text.split())}"
            )
            for ratio in RATIOS:
                done += cells(model, case, prefill, ratio, fed, full)
                progress.update(bar, advance=1)
    for variant in VARIANTS:
        shares = [cell.utility / cell.own for cell in done if cell.variant == variant]
        facts.append(f"{variant}: at least {min(shares):.4f} of the bound from its own start")
    lines, made = header(time.perf_counter() - begin, facts), tables(done)
    for title, (head, *body) in made.items():
        table = Table(*head, title=title)
        for row in body:
            table.add_row(*row)
        console.print(table)
    console.print("\n".join(lines))
    path = Path(__file__).parent / "results" / "allocation_quality.md"
    write_atomically(path, markdown(lines, made).encode())


if __name__ == "__main__":
    main()
