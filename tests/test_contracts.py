"""Every registered strategy keeps the contract of its stage, and the checks find violations."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from gracekv.allocate import Greedy, PerHead
from gracekv.backends import AttentionSpec
from gracekv.errors import PluginError
from gracekv.pipeline.composition import REGISTRIES
from gracekv.registry import Registry
from gracekv.segment import Partition, Segmenter, Uniform
from gracekv.testing import contracts
from gracekv.value import SCORERS, MeanAttention, OutputProjection, Scorer, TokenScores
from support.covering import LONG

EVERY = [(stage, name) for stage, registry in REGISTRIES.items() for name in registry]


@pytest.mark.parametrize(("stage", "name"), EVERY)
def test_every_registered_strategy_keeps_its_promises(stage, name):
    strategy = REGISTRIES[stage].build(name)
    if stage == "backend":
        spec = AttentionSpec(torch.device("cpu"))
        obstacle = strategy.resolve(spec).obstacle(spec)
        if obstacle is not None:
            pytest.skip(obstacle)
    # Daily, every other one in bfloat16.
    contracts.check(strategy, seeds=range(2) if LONG else [EVERY.index((stage, name)) % 2])


@dataclass(frozen=True)
class Spoiled(Scorer):
    """Mean attention with a defect."""

    fault: str = "none"

    def layer(self, capture, region, memory):
        return MeanAttention().layer(capture, region, memory)

    def __call__(self, prefill, region):
        found = MeanAttention()(prefill, region)
        scores, seeds = found.scores, found.seed_scores
        FAULTS.get(self.fault, lambda prefill: None)(prefill)
        scores = SPOILED.get(self.fault, lambda scores: scores)(scores)
        return TokenScores(scores, 2 * seeds if self.fault == "sum" else seeds)


FAULTS = {"draws": lambda _: torch.rand(1), "writes": lambda prefill: prefill.keys[0].mul_(1)}
SPOILED = {
    "negative": lambda scores: scores - 1,
    "double": lambda scores: scores.double(),
    "shape": lambda scores: scores[:1],
    "random": lambda scores: scores + torch.rand(scores.shape),
    "compares": lambda scores: scores / scores.mean(),
}


@pytest.fixture
def spoiled(monkeypatch):
    monkeypatch.setattr(Spoiled, "name", "spoiled", raising=False)
    monkeypatch.setitem(SCORERS._classes, "spoiled", Spoiled)


@pytest.mark.parametrize(("fault", "message"), [
    ("negative", "scores hold < 0"), ("double", "scores must be float32"), ("sum", "add up to 1"),
    ("shape", "scores must be"), ("random", "differ between two calls"),
    ("draws", "global generator was used"),
    ("compares", "'spoiled' compares layers: its scores of layer 0 differ"),
    ("writes", "tensors were modified"),
])  # fmt: skip
def test_a_scorer_that_breaks_a_promise_is_named(spoiled, fault, message):
    with pytest.raises(AssertionError, match=message):
        contracts.check_stage(Spoiled(fault=fault), seed=0)


def test_what_compares_layers_without_saying_so_is_named(monkeypatch, spoiled):
    monkeypatch.setattr(OutputProjection, "compares_layers", False)
    with pytest.raises(AssertionError, match="'output_projection' compares layers"):
        contracts.check_stage(OutputProjection(), seed=0)
    monkeypatch.setattr(PerHead, "__call__", lambda _, x, plan: (9 * x.mean(-1) / x.mean()).long())
    with pytest.raises(AssertionError, match="other caps: it compares layers"):
        contracts.check_stage(PerHead(), seed=0)
    object.__setattr__(hiding := Spoiled(), "first", SCORERS.build("multi_hop"))
    with pytest.raises(AssertionError, match="not in `parts`"):
        contracts.check_stage(hiding, seed=0)


def test_what_is_no_plain_data_is_named(spoiled):
    contracts.check_value(Spoiled())
    unfrozen = dataclass(type("Unfrozen", (), {"registry": SCORERS}))
    with pytest.raises(AssertionError, match="not a frozen dataclass"):
        contracts.check_value(unfrozen())
    with pytest.raises(AssertionError, match="has no stage"):
        contracts.check_value(dataclasses.replace(_Stray()))


@dataclass(frozen=True)
class _Stray(Segmenter):
    """Not in any registry that pipelines know."""

    registry = Registry("stray", "nothing")

    def __call__(self, prefill, region):
        return Partition(torch.tensor([region.start, region.end]))


@pytest.mark.parametrize(("more", "message"), [(5, "spent of a budget"), (-25, "affordable")])
def test_an_allocator_that_overspends_or_buys_nothing_is_named(monkeypatch, more, message):
    real = Greedy.__call__

    def wrong(self, start, quota):
        budget = max(start.spent, start.budget + more)
        result = real(self, dataclasses.replace(start, budget=budget), quota)
        return dataclasses.replace(result, budget=start.budget)

    monkeypatch.setattr(Greedy, "__call__", wrong)
    with pytest.raises(AssertionError, match=message):
        contracts.check_stage(Greedy(), seed=0)


def test_a_segmenter_that_leaves_a_gap_is_named(monkeypatch):
    real = Uniform.__call__
    monkeypatch.setattr(
        Uniform, "__call__", lambda self, p, region: Partition(real(self, p, region).bounds + 1)
    )
    with pytest.raises(AssertionError, match="from end to end"):
        contracts.check_stage(Uniform(), seed=0)


def test_a_scorer_of_the_last_release_is_told_what_to_change():
    with pytest.warns(DeprecationWarning, match=r"gracekv\.value\.LayerScorer is now Scorer"):
        from gracekv.value import LayerScorer
    for name, method in {
        "layer": lambda self, prefill, layer, region, memory: None,
        "__call__": lambda self, prefill, region: None,
    }.items():
        with pytest.raises(PluginError, match=r"Old is a scorer for gracekv 0\.2\. Since 0\.3 a"):
            type("Old", (LayerScorer,), {name: method})
