"""Record the data of the figures: one page of the demo's chapter through every stage at 8x.

    python docs/figures/capture.py      # needs the embedded model; half a minute on two cores

Writes everything that is drawn to `capture.json`, so the figures themselves need no model. Trees
are grown in full (`prune=False`), so that the figures can also show nodes that were not bought.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gracekv
from gracekv.allocate import Budget, Frontier
from gracekv.allocate.operations import Operations
from gracekv.cli.demo import DOCUMENT, INSTRUCTION, QUESTION
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2
from gracekv.pipeline import Pipeline
from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill, depth_layers
from gracekv.segment import CurvatureDP
from gracekv.segment.surprisal import Surprisal
from gracekv.value import MultiHop
from gracekv.value.base import attention_sums
from gracekv.value.multi_hop import select_seeds

TARGET = Path(__file__).with_name("capture.json")
RATIO = 8
RATIOS = (4, 8, 16)
PARAGRAPHS = slice(12, 21)  # from the hall with the locked doors to the candle that goes out
# The tree that is drawn: the slot with the bottle's label, in a head that kept it in detail.
LAYER, HEAD, SLOT = 21, 2, 23
UTILITY_BINS = 64


def main() -> None:
    """Run the pipeline once and write `capture.json`."""
    model, tokenizer = load_smollm2()
    chapter = (files("gracekv") / "data" / DOCUMENT).read_text(encoding="utf-8")
    paragraphs = [line for line in chapter.split("\n") if line.strip()]
    prompt = gracekv.Prompt.from_chat(
        tokenizer,
        context="\n\n".join(paragraphs[PARAGRAPHS]),
        question=QUESTION,
        instruction=INSTRUCTION,
    )
    pipeline = Pipeline.from_dict({"prune": False})
    prefill = gracekv.capture(model, prompt, pipeline.needs())
    run = pipeline.run(prefill, Budget.ratio(RATIO))
    region = prefill.spans.region(run.plan.recent)
    data = {
        "tokens": _token_texts(tokenizer, prompt.ids.tolist()),
        "region": [region.start, region.end],
        "context": [prefill.spans.context_start, prefill.spans.context_end],
        "ratio": RATIO,
        "slots": run.partition.bounds.tolist(),
        "boundary_score": _rounded(_boundary_score(pipeline, run, prefill)),
        "relevance": {name: _rounded(x, 6) for name, x in _relevance(pipeline, run, prefill)},
        "entries": {
            str(ratio): pipeline.run(prefill, Budget.ratio(ratio)).accounting.entries.tolist()
            for ratio in RATIOS
        },
        "accounting": {
            "budget": run.accounting.budget,
            "spent": run.accounting.spent,
            "floor": run.accounting.floor_spent,
            "recent": run.accounting.recent,
        },
        "tree": _tree(run),
        "states": _states(run),
        "auction": _auction(run, pipeline, prefill),
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    write_atomically(TARGET, (text + "\n").encode())


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token. A character split over several tokens belongs to the last one."""
    texts, pending = [], []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending)
        complete = not text.endswith("\N{REPLACEMENT CHARACTER}")
        texts.append(text if complete else "")
        pending = [] if complete else pending
    return texts


def _boundary_score(pipeline: Pipeline, run: Run, prefill: Prefill) -> Tensor:
    """The segmenter's score for ending a slot at each position: [T]."""
    assert isinstance(pipeline.segment, CurvatureDP)
    assert run.partition is not None
    assert run.partition.curvature is not None
    surprisal = prefill.observation(Surprisal())
    return pipeline.segment.boundary_score(run.partition.curvature, surprisal)


def _relevance(pipeline: Pipeline, run: Run, prefill: Prefill) -> list[tuple[str, Tensor]]:
    """Direct relevance, each hop's findings, and worth, each [N], averaged over heads."""
    scorer = pipeline.value
    assert isinstance(scorer, MultiHop)
    assert run.relevance is not None
    region = prefill.spans.region(run.plan.recent)
    score = run.relevance.seed_scores
    found = [("direct", score)]
    known = torch.zeros(region.length, dtype=torch.bool)
    layers = depth_layers(scorer.depths, prefill.layers)
    for hop in range(scorer.hops):
        seeds = select_seeds(score, scorer.seed_mass, scorer.max_seeds)
        known[seeds] = True
        weights = score[seeds] / score[seeds].sum()
        places = seeds + region.start
        reached = [
            attention_sums(prefill.layer(layer), places, region, weights).sum(0) for layer in layers
        ]
        score = torch.stack(reached).sum(0).masked_fill(known, 0)
        found.append((f"seeds {hop + 1}", torch.zeros(region.length).index_fill(0, seeds, 1.0)))
        found.append((f"hop {hop + 1}", score / score.sum()))
    return [*found, ("worth", run.relevance.scores.mean(dim=(0, 1)))]


def _tree(run: Run) -> dict[str, Any]:
    """The nodes of one tree, parents before children."""
    forest, frontier = run.forest, run.frontier
    assert forest is not None
    assert frontier is not None
    number = (LAYER * forest.heads + HEAD) * forest.slots + SLOT
    nodes = (forest.tree == number).nonzero().flatten()
    place = {int(node): i for i, node in enumerate(nodes)}
    kept, split = frontier.kept, frontier.split
    return {
        "layer": LAYER,
        "head": HEAD,
        "slot": SLOT,
        "start": forest.start[nodes].tolist(),
        "end": forest.end[nodes].tolist(),
        "level": forest.level[nodes].tolist(),
        "parent": [place.get(int(forest.parent[node]), -1) for node in nodes],
        "kept": kept[nodes].long().tolist(),
        "split": split[nodes].long().tolist(),
    }


def _states(run: Run) -> list[list[list[int]]]:
    """The kept intervals of the drawn slot in every head, layer by layer."""
    forest, frontier = run.forest, run.frontier
    assert forest is not None
    assert frontier is not None
    heads = []
    for number in range(SLOT, forest.trees, forest.slots):
        kept = (frontier.kept & (forest.tree == number)).nonzero().flatten()
        kept = kept[forest.start[kept].argsort()]
        heads.append(torch.stack([forest.start[kept], forest.end[kept]], dim=1).tolist())
    return heads


def _auction(run: Run, pipeline: Pipeline, prefill: Prefill) -> dict[str, Any]:
    """Operations by the lowest utility per entry on their path, and which of them were bought."""
    forest, frontier = run.forest, run.frontier
    assert forest is not None
    assert frontier is not None
    assert run.relevance is not None
    ops = Operations.of(forest)
    candidates = pipeline.floor.candidates(run.relevance.scores, run.plan)
    start = pipeline.floor.realize(forest, candidates, run.plan, None)
    floor = ops.executed(start)
    bought = ops.executed(frontier) & ~floor
    adds = torch.arange(len(ops)) < forest.trees
    # From an empty start, so that the floor's purchases rank as they would in the auction.
    key = ops.path_minimum(ops.executed(Frontier.empty(forest, run.plan.base)))
    open_key = ops.path_minimum(floor)
    cut = float(open_key[bought & (open_key > 0)].min())
    positive = key[key > 0].log10()
    low, high = float(positive.quantile(0.02)), float(positive.max())
    edges = torch.linspace(low, high, UTILITY_BINS + 1, dtype=torch.float64)
    groups = {
        "floor": floor,
        "Add": bought & adds,
        "Split": bought & ~adds,
        "not bought": ~floor & ~bought,
    }
    log_key = key.clamp(min=1e-300).log10().clamp(min=low, max=high)
    return {
        "edges": _rounded(edges),
        "cut": round(torch.tensor(cut).log10().item(), 4),
        "operations": {
            name: torch.histogram(log_key[mask & (key > 0)], edges).hist.long().tolist()
            for name, mask in groups.items()
        },
        "without gain": {name: int((mask & (key <= 0)).sum()) for name, mask in groups.items()},
        "entries": {name: int(ops.cost[mask].sum()) for name, mask in groups.items()},
    }


def _rounded(values: Tensor, digits: int = 4) -> list[float]:
    return [round(x, digits) for x in values.tolist()]


if __name__ == "__main__":
    main()
