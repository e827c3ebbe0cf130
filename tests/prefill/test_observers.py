"""Every observer against the interface, and ways to break it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import gracekv.pipeline.composition  # noqa: F401  (imports every strategy)
from gracekv.errors import MissingCaptureError, NonFiniteError, ObserverError, ShapeError
from gracekv.hf.capture import capture, run_capture
from gracekv.prefill import LayerObserver, Needs, Observer, Region
from gracekv.prefill.observations import Observations, check_observers
from gracekv.prefill.observer import TokenRun
from gracekv.prefill.options import DEFAULTS
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import Past
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.testing import check_observer, synthetic_prefill
from gracekv.testing.models import tiny_llama
from gracekv.value.block_replay import BlockReplaySums
from gracekv.value.column_sums import ReceivedAttention
from gracekv.value.critical import WrittenNorms
from gracekv.value.draft_attention import Draft
from gracekv.value.expected_attention import QueryMoments
from gracekv.value.kvzip_two_pass import Reconstruction
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms
from gracekv.value.repeated_attention import RepeatedQueries
from support.families import FAMILIES
from support.observers import HeadOutputs

OURS = [
    BlockInput(0.5), BlockReplaySums(16, 3.0, 5), Draft(3), HeadOutputs(), ProjectedNorms(),
    ProjectionNorms(), QueryMoments(4), ReceivedAttention(), Reconstruction(20),
    RepeatedQueries(9, 20), Surprisal(), WrittenNorms(),
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("observer", OURS, ids=repr)
def test_ours_keep_the_contract(observer, seed):
    check_observer(observer, seed)


def leaves(cls):
    below = cls.__subclasses__()
    return {leaf for x in below for leaf in leaves(x)} if below else {cls}


def test_all_of_ours_are_checked():
    ours = {x for x in leaves(Observer) if x.__module__.startswith("gracekv.")}
    assert ours == {type(x) for x in OURS} - {HeadOutputs}


def test_observers_of_0_2_get_the_softmax_arguments_without_the_scale():
    run = synthetic_prefill().layer(0).run_of(Region(0, 4))
    assert run.softmax_args == {"scale": run.scale, **run.logits}


@dataclass(frozen=True)
class Sums(LayerObserver):
    """Sums of keys [L, T], with one defect."""

    fault: str = "none"

    def shape(self, prefill):
        return prefill.layers, prefill.spans.length

    def accumulator(self, layer, layers, spans):
        return Faulty(self.fault, spans)


class Faulty:
    def __init__(self, fault, spans):
        self.fault, self.kept = fault, []
        self.sums = torch.zeros(spans.length)

    def add(self, run):
        keys = run.keys if self.fault == "reads ahead" else run.keys[:, run.start : run.end]
        self.kept.append(keys[0, :, 0])
        self.sums[run.start : run.end] = run.keys[:, run.start : run.end].sum((0, 2))
        if self.fault == "counts runs":
            self.sums += 1

    def result(self):
        if self.fault == "shape":
            return self.sums[1:]
        if self.fault == "nan":
            return self.sums / 0 * 0
        if self.fault == "keeps a view":
            return torch.cat(self.kept)[-len(self.sums) :]
        if self.fault == "reads ahead":
            return self.kept[0]
        return self.sums


def test_a_plain_observer_passes():
    for seed in (0, 2):
        check_observer(Sums(), seed)


FAULTS = [
    ("shape", ShapeError),
    ("nan", NonFiniteError),
    ("keeps a view", NonFiniteError),
    ("reads ahead", NonFiniteError),
    ("counts runs", AssertionError),
]


@pytest.mark.parametrize(("fault", "error"), FAULTS)
def test_faults_are_found_and_named(fault, error):
    with pytest.raises(error, match=rf"Sums\(fault='{fault}'\)"):
        check_observer(Sums(fault))


class Unhashable(Sums):
    __hash__ = None


@dataclass(frozen=True)
class Greedy(Sums):
    reads: ClassVar = frozenset({"everything"})


def test_what_is_no_value_is_found():
    with pytest.raises(TypeError, match="unhashable"):
        check_observer(Unhashable())
    with pytest.raises(AssertionError, match="reads an unknown source"):
        check_observer(Greedy())


def test_a_driver_refuses_what_it_cannot_give_by_name():
    with pytest.raises(
        ObserverError,
        match=r"BlockInput\(depth=0.5\) reads hidden, but an engine provides outputs "
        r"\(see gracekv\.prefill\.observer\.Source\)\. Ask less\.",
    ):
        check_observers({BlockInput(0.5)}, frozenset({"outputs"}), "an engine", "Ask less.")
    check_observers({ReceivedAttention()}, frozenset(), "an engine's worker", "Ask less.")


def test_the_model_does_not_run_for_what_is_refused():
    model = FAMILIES["gemma2"].model()
    prompt = Prompt.from_ids(torch.arange(1, 60), (2, 50))
    model.register_forward_pre_hook(lambda *_: pytest.fail("The model runs."))
    with pytest.raises(ObserverError, match=r"Draft\(tokens=2\) reads passes.*layer 0"):
        capture(model, prompt, Needs.observed(Draft(2)))
    with pytest.raises(ObserverError, match=r"Reconstruction.*a passage.*gracekv-agnostic"):
        run_capture(model, prompt, Past((), 0, 0), Needs.observed(Reconstruction()), DEFAULTS)


def test_wrong_shapes_and_nan_are_named_by_the_capture():
    model, prompt = tiny_llama(), Prompt.from_ids(torch.arange(60), (2, 50))
    with pytest.raises(ShapeError, match=r"Sums\(fault='shape'\) must .* \[2, 60\] .* \[2, 59\]"):
        capture(model, prompt, Needs.observed(Sums("shape")))
    with pytest.raises(NonFiniteError, match=r"Sums\(fault='nan'\) observed NaN"):
        capture(model, prompt, Needs.observed(Sums("nan")))
    prefill = capture(model, prompt, Needs.observed(Sums()))
    want = torch.stack([keys.sum((0, 2)) for keys in prefill.keys])
    torch.testing.assert_close(prefill.observation(Sums()), want)
    with pytest.raises(MissingCaptureError, match=r"Surprisal\(\) has not .* Sums\(fault='none'\)"):
        prefill.observation(Surprisal())


def test_layers_without_an_observer_make_no_run():
    prefill = synthetic_prefill(layers=4)
    found = Observations([BlockInput(0.5)], 4, prefill.spans)
    assert [found.reads("hidden", layer) for layer in range(4)] == [False, False, True, False]
    for layer in (0, 1, 3):
        found.add(layer, lambda: pytest.fail("A run was made."))
    run = prefill.layer(2).run_of(prefill.spans.region(0))
    assert isinstance(run, TokenRun)
    assert replace(run, start=0).end == run.queries.shape[1]
