"""Do merged entries earn their place beside exact ones, when both are fitted?

    python benchmarks/coarse_entries.py --data FOLDER

At the same number of entries, `gracekv-plus` gives a share of its budget to coarse entries: the
tokens that it drops are cut, head by head, into runs of equal foreseen score, and each run becomes
one prototype (mean key before rotation, weighted mean value), which needs none of its siblings (a
sparse frontier). Heads get coarse entries by the score that they drop. Values and multiplicities of
all entries are then fitted, a prototype's multiplicity from nothing to all of its tokens. KL to
FullKV over its own 24 tokens, tuning prompts only. Rows are appended to `--rows` as they come;
`benchmarks/results/coarse_entries.md` is written at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor

import gracekv
from gracekv.allocate import Budget
from gracekv.allocate.top_tokens import top_tokens
from gracekv.cache import RaggedCache, RaggedEntries
from gracekv.evaluate.answers import compare, teacher_force
from gracekv.evaluate.experiment import Experiment
from gracekv.evaluate.rendering import render
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.worker import Worker
from gracekv.fit import ValuesAndMass, values_and_mass
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.hf.smollm2 import load_smollm2
from gracekv.kernels.ragged import offsets
from gracekv.pipeline import Pipeline
from gracekv.prefill import Prefill, Region

RESULTS = Path(__file__).parent / "results"
TASKS = (
    "ruler:niah_multikey_1", "ruler:niah_single_3", "ruler:vt", "ruler:qa_1", "ruler:fwe",
    "longbench:qasper", "longbench:gov_report", "longbench:samsum",
)  # fmt: skip
SEED, ANSWER = 142, 24
SHARES = (0.0, 0.05, 0.15, 0.3)
RATIOS = (8, 16, 32, 64)


def prompt_of(task: str, model: Any, tokenizer: Any, data: Path) -> Any:
    """The task's second tuning sample, of about 1,000 tokens."""
    size: dict[str, Any] = {"lengths": [1024]} if task.startswith("ruler") else {"max_prompt": 1100}
    panel = {
        "tasks": [task], "methods": ["gracekv-plus"], "ratios": [8], "samples": 2, "seed": SEED,
        "recent_share": 0.5, "generate": False, "truncate": "middle", **size,
    }  # fmt: skip
    experiment = Experiment.from_dict(
        {"model": "smollm2", "dtype": "float32", "data": str(data), "panels": [panel]}
    )
    first = experiment.panels[0]
    found = next(iter(first.all_tasks()))
    worker = Worker("smollm2", "float32", model, tokenizer, Sources(data))
    sample = found.sample(1, worker.sources, tokenizer)
    longest = worker.longest_prompt(first, found)
    return render(sample, tokenizer, longest, first.truncate, first.answer_words).prompt


def with_coarse(
    prefill: Prefill, region: Region, scores: Tensor, kept: Tensor, coarse: int
) -> RaggedCache:
    """Exact tokens and `coarse` prototypes of the others.

    Args:
        prefill: of the prompt.
        region: the N compressible tokens.
        scores: float32 [L, G, N].
        kept: bool [L, G, N] exact tokens.
        coarse: prototypes in all heads.
    """
    rest = scores.masked_fill(kept, 0.0).square().sum(-1)
    counts = (coarse * rest / rest.sum()).floor().long()
    covered = prefill.spans.length - 1
    layers = []
    for layer in range(prefill.layers):
        rows: list[list[Tensor]] = [[], [], [], []]
        lengths = []
        for head in range(prefill.kv_heads):
            exact = torch.ones(covered, dtype=torch.bool)
            inside = kept[layer, head][: covered - region.start]
            exact[region.start : region.start + len(inside)] = inside
            entries = _entries(prefill, layer, head, exact, scores[layer, head], region,
                               int(counts[layer, head]))  # fmt: skip
            lengths.append(len(entries[0]))
            for found, own in zip(rows, entries, strict=True):
                found.append(own)
        keys, values, positions, log_m = (torch.cat(parts) for parts in rows)
        layers.append(
            RaggedEntries(keys, values, positions.int(), log_m, offsets(torch.tensor(lengths)))
        )
    return RaggedCache(tuple(layers), length=covered)


def _entries(
    prefill: Prefill, layer: int, head: int, exact: Tensor, scores: Tensor, region: Region,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys, values, positions and log multiplicities of one head, by position."""
    keys, values = prefill.keys[layer][head], prefill.values[layer][head]
    at = exact.nonzero()[:, 0]
    gone = (~exact).nonzero()[:, 0]
    count = min(count, len(gone) // 2)
    if not count:
        return keys[at], values[at], at, torch.zeros(len(at))
    weight = scores[gone - region.start] + 0.1 * scores[gone - region.start].mean()
    run = (weight.cumsum(0) / weight.sum() * count).long().clamp(max=count - 1)
    total = torch.zeros(count).index_add(0, run, weight)
    size = torch.zeros(count).index_add(0, run, torch.ones(len(gone)))
    full = size > 0
    plain = prefill.rope.unrotate(keys[gone], gone)
    mean_key = torch.zeros(count, keys.shape[1]).index_add(0, run, plain) / size[:, None]
    mean_value = torch.zeros(count, keys.shape[1]).index_add(0, run, weight[:, None] * values[gone])
    mean_value = mean_value / total[:, None]
    # The token in the middle of the run.
    middle = gone[(size.cumsum(0) - size + (size - 1).clamp_min(0) / 2).long()[full]]
    merged = prefill.rope.rotate(mean_key[full], middle)
    order = torch.cat([at, middle]).argsort()
    log_m = torch.cat([torch.zeros(len(at)), size[full].log()])
    return (
        torch.cat([keys[at], merged])[order],
        torch.cat([values[at], mean_value[full]])[order],
        torch.cat([at, middle])[order],
        log_m[order],
    )


@torch.no_grad()
def measure(model: Any, prompt: Any) -> list[dict[str, float]]:
    """Rows of one prompt: KL by ratio and share of coarse entries."""
    pipe = Pipeline.named("gracekv-plus-no-fit")
    fitter = ValuesAndMass()
    prefill = gracekv.capture(model, prompt)
    full = gracekv.compress(model, prompt, prefill=prefill, ratio=1, pipeline="fullkv")
    answer = full.generate_ids(ANSWER)[0].cpu()
    wanted = teacher_force(model, prompt.ids, answer, full.new_cache())
    rows = []
    for ratio in RATIOS:
        plan = pipe.plan(prefill, Budget.ratio(ratio))
        region = prefill.spans.region(plan.recent)
        scores = pipe.value(prefill, region).scores
        for share in SHARES:
            coarse = int(share * plan.base)
            kept = top_tokens(scores, pipe.sensitivity(prefill), plan.base - coarse, None)
            cache = with_coarse(prefill, region, scores, kept, coarse)
            for fitted in (False, True):
                own = fitter(prefill, region, cache) if fitted else cache
                forced = teacher_force(model, prompt.ids, answer, GraceCache(own))
                kl = compare(forced, wanted, answer)["kl"]
                rows.append({"ratio": ratio, "share": share, "fitted": fitted, "kl": kl})
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    cells: dict[tuple[bool, float, float], list[float]] = defaultdict(list)
    for row in rows:
        cells[row["fitted"], row["share"], row["ratio"]].append(math.log(max(row["kl"], 1e-6)))
    prompts = len(cells[False, 0.0, RATIOS[0]])
    lines = [
        "# Coarse entries beside exact ones",
        "",
        f"- machine: {machine.threads()}",
        f"- commit: {machine.commit()}",
        f"- {prompts} tuning prompts (seed {SEED}, the second sample of each task, about 1,000 "
        f"tokens; `benchmarks/coarse_entries.py`), SmolLM2-135M, float32. Mean log KL to FullKV "
        f"over its own {ANSWER} tokens at the same number of entries; lower is better.",
        "",
        "| coarse entries | fitted | " + " | ".join(f"{ratio}x" for ratio in RATIOS) + " |",
        "|--:|---|" + "--:|" * len(RATIOS),
    ]
    for fitted in (False, True):
        for share in SHARES:
            means = (cells[fitted, share, ratio] for ratio in RATIOS)
            shown = " | ".join(f"{sum(x) / len(x):.2f}" for x in means)
            lines.append(f"| {share:.0%} | {'yes' if fitted else 'no'} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="see docs/evaluation.md")
    parser.add_argument("--rows", type=Path, default=Path("coarse_entries.jsonl"))
    args = parser.parse_args()
    # A prototype may turn out to stand for nothing.
    values_and_mass.LEAST = 0.01
    rows = [json.loads(x) for x in args.rows.read_text().splitlines()] if args.rows.exists() else []
    model, tokenizer = load_smollm2()
    attach(model)
    for task in TASKS:
        if any(row["task"] == task for row in rows):
            continue
        found = [{"task": task, **row} for row in measure(model, prompt_of(task, model, tokenizer,
                                                                          args.data))]  # fmt: skip
        with args.rows.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in found))
        rows += found
        print(task, flush=True)
    (RESULTS / "coarse_entries.md").write_text(report(rows))


if __name__ == "__main__":
    main()
