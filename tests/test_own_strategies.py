"""Strategies of one's own: contracts find what a pipeline cannot use; the docs' promises hold."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

import gracekv
from gracekv import Budget, CaptureOptions, Pipeline
from gracekv.allocate import QUOTAS, Quota
from gracekv.backends import BACKENDS, AttentionBackend, Eager
from gracekv.decode import DECODERS, Decoder
from gracekv.errors import ConfigError, NonFiniteError, ShapeError
from gracekv.fit import FITTERS, Fitter
from gracekv.pipeline.composition import REGISTRIES
from gracekv.pipeline.config import load_pipeline, save_pipeline
from gracekv.precision import PRECISIONS, Precision, UniformPrecision
from gracekv.precision.base import EXACT
from gracekv.prefill import LayerObserver, Needs
from gracekv.prefill.needs import prompt_samples
from gracekv.registry import bounded
from gracekv.testing import contracts, synthetic_prefill
from gracekv.testing.models import tiny_llama
from gracekv.value import SCORERS, MeanAttention, Mixture, Scorer, ValueNorm
from gracekv.value.base import attention_sums


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    """What a test registers is forgotten after it."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


PROMPT = gracekv.Prompt.from_ids(torch.arange(200) % 97, (4, 190))


@dataclass(frozen=True)
class ReceivedShares(Quota):
    """Heads share their layer's part by the largest attention that a position received."""

    uses_column_sums = True

    def __call__(self, scores, plan):
        assert scores.shape[1:] == (4, 215)
        peak = scores.amax(-1).view(len(scores), plan.heads, -1).mean(-1)
        return (peak / peak.sum(-1, keepdim=True) * plan.base / plan.layers).long()


def test_a_quota_of_column_sums_reads_them_whatever_it_compares():
    prefill, caps = synthetic_prefill(layers=3, context=200), []
    for compares in (True, False):
        fields = {"compares_layers": compares, "__module__": __name__}
        one = QUOTAS.register("received")(type("Received", (ReceivedShares,), fields))
        pipeline = Pipeline.from_dict({"quota": one()}, base="snapkv")
        caps.append(pipeline.run(prefill, Budget.ratio(4)).accounting.entries)
    assert torch.equal(*caps)
    plan = pipeline.plan(prefill, Budget.ratio(4))
    pipeline = replace(pipeline, quota=one())
    assert "column sums of all layers" in pipeline.holds_all(plan, prefill.entry_bytes)


@dataclass(frozen=True)
class Doubled(Fitter):
    """Values twice as long, as float32."""

    def layer(self, packed, reference, region):
        inside = (packed.positions >= region.start) & (packed.positions < region.end)
        factor = torch.where(inside, 2.0, 1.0)[:, None]
        return replace(packed, values=packed.values * factor)


def test_values_of_another_dtype_are_refused_and_the_strategy_is_named():
    doubled = FITTERS.register("doubled")(Doubled)()
    said = r"'doubled' returned values of torch\.float32 for a cache of torch\.bfloat16"
    with pytest.raises(ShapeError, match=said):
        contracts.check(doubled)

    @DECODERS.register("longer")
    class Longer(Decoder):
        """The last entries, with values as float32."""

        def scores(self, held):
            return held.positions.float()

        def fit(self, held, kept, packed):
            return replace(packed, values=packed.values.float())

    with pytest.raises(ShapeError, match="'longer' returned values"):
        contracts.check(Longer())


def rare_readers(found):
    @SCORERS.register("rare_readers")
    class RareReaders(Scorer):
        """Attention from the context's rare tokens."""

        def needs(self):
            return Needs(later_queries=True)

        def asks(self, prefill, region, memory):
            memory["rare"] = self.rare(prefill.token_ids, region)
            return memory["rare"]

        def rare(self, ids, region):
            return torch.arange(region.start, region.end)[::7]

        def layer(self, capture, region, memory):
            at = memory["rare"] if found == "asks" else self.rare(capture.info.token_ids, region)
            return attention_sums(capture, at, region, over="mean")

    return RareReaders()


def test_the_contract_knows_that_nothing_is_asked_layer_by_layer():
    with pytest.raises(AssertionError, match="'rare_readers' finds no 'rare'"):
        contracts.check(rare_readers("asks"))
    contracts.check(own := rare_readers("layer"))
    pipeline = Pipeline.from_dict({"value": own}, base="snapkv")
    assert gracekv.compress(tiny_llama(), PROMPT, ratio=4, pipeline=pipeline).accounting.spent


@dataclass(frozen=True)
class LateNorms(LayerObserver):
    """Lengths of the queries of every other layer."""

    def shape(self, prefill):
        return None, prefill.query_heads, prefill.spans.length

    def accumulator(self, layer, layers, spans):
        return Norms() if layer % 2 else None


class Norms:
    def __init__(self):
        self.runs = []

    def add(self, run):
        self.runs.append(run.queries.float().norm(dim=-1))

    def result(self):
        return torch.cat(self.runs, 1)


@pytest.mark.parametrize("layers", [2, 5])
def test_an_observer_may_skip_layers_whatever_is_read_first(layers):
    @SCORERS.register("late_norms")
    class Late(Scorer):
        """Lengths of queries, where they are observed."""

        def needs(self):
            return Needs.observed(LateNorms())

        def layer(self, capture, region, memory):
            if capture.number % 2 == 0:
                assert LateNorms() not in capture.observed
                return torch.ones(capture.kv_heads, region.length)
            seen = capture.observation(LateNorms())
            return seen[: capture.kv_heads, region.start : region.end]

    model, pipeline = (
        tiny_llama(layers=layers),
        Pipeline.from_dict({"value": Late()}, base="snapkv"),
    )
    whole = gracekv.capture(model, PROMPT, pipeline.needs())
    one, other = (
        gracekv.compress(model, PROMPT, ratio=4, pipeline=pipeline, **how)
        for how in ({}, {"prefill": whole})
    )
    assert torch.equal(one.accounting.entries, other.accounting.entries)
    assert one.generate_ids(4).tolist() == other.generate_ids(4).tolist()


@pytest.mark.parametrize("needs", [
    Needs(prompt_samples=64), Needs(question_queries=48), Needs(context_samples=frozenset({9})),
])  # fmt: skip
@pytest.mark.parametrize("base", ["snapkv", "gracekv-plus"])
def test_queries_that_needs_name_are_there_whatever_the_memory(base, needs):
    @SCORERS.register("sampled")
    class Sampled(Scorer):
        """Attention from what `needs` names."""

        def needs(self):
            return needs

        def layer(self, capture, region, memory):
            at = prompt_samples(capture.spans.length, needs.prompt_samples)
            if needs.context_samples:
                at = gracekv.prefill.needs.region_samples(region, 9)
            if needs.question_queries > 32:
                at = capture.spans.direct_probes(48, 32)
            return attention_sums(capture, at, region, over="mean")

    pipeline = Pipeline.from_dict({"value": Sampled()}, base=base)
    for memory in (None, 0):
        how = CaptureOptions(stream=False, memory_limit=memory)
        result = gracekv.compress(tiny_llama(), PROMPT, ratio=4, pipeline=pipeline, capture=how)
        assert result.accounting.spent


def test_decoders_that_a_cut_cannot_use_are_found():
    @DECODERS.register("attended")
    class Attended(Decoder):
        """Mean attention, of queries that it does not ask for."""

        def scores(self, held):
            return held.attention().mean(1)

    with pytest.raises(AssertionError, match="infinity or NaN"):
        contracts.check(Attended())

    @DECODERS.register("late")
    class Late(Decoder):
        """NaN above the first layer."""

        def scores(self, held):
            return held.positions.float() * (1 if held.number == 0 else torch.nan)

    with pytest.raises(NonFiniteError, match="'late' gave scores of NaN"):
        contracts.check(Late())
    result = gracekv.compress(tiny_llama(), PROMPT, ratio=4, pipeline="snapkv")
    limit = gracekv.Limit(entries_per_head=70, strategy=Attended(), every=8, window=8)
    with pytest.raises(NonFiniteError, match=r"'attended' gave scores of NaN.*it is 0"):
        result.generate_ids(max_new_tokens=40, eos_token_id=-1, limit=limit)


@pytest.mark.parametrize(("registry", "base", "field"), [
    (FITTERS, Fitter, "layers"), (QUOTAS, Quota, "layer"), (DECODERS, Decoder, "guarded"),
    (SCORERS, Scorer, "parts"), (PRECISIONS, Precision, "widths"),
])  # fmt: skip
def test_fields_named_as_what_the_stage_calls_are_refused(registry, base, field):
    annotated = {"__annotations__": {field: "int"}, field: 4, "__module__": __name__}
    if field == "parts":
        del annotated[field]
    with pytest.raises(ConfigError, match=rf"has fields \['{field}'\], names that the stage"):
        registry.register("odd")(type("Odd", (base,), annotated))


@dataclass(frozen=True)
class OfTwoTypes(Scorer):
    """Lengths of keys in some layers."""

    power: int | float = bounded(2, above=0)
    layers: tuple[int, ...] | Literal["all"] = "all"
    window: int | str = bounded("all", at_least=1)
    scorer: str = "none of ours"

    def layer(self, capture, region, memory):
        return capture.keys[:, region.start : region.end].float().norm(dim=-1)


def test_fields_of_two_types_are_checked_and_come_back_from_a_file(tmp_path):
    SCORERS.register("of_two_types")(OfTwoTypes)
    for field, wrong, said in [
        ("power", -3, "a whole number > 0; got -3. Or: "),
        ("power", "two", "takes a number > 0; got 'two'"),
        ("layers", "some", "takes one of 'all'; got 'some'"),
        ("layers", ("a",), "a whole number; got 'a'"),
        ("window", 0, "a whole number >= 1; got 0"),
    ]:
        with pytest.raises(ConfigError, match=said):
            OfTwoTypes(**{field: wrong})
        with pytest.raises(ConfigError, match=said):
            OfTwoTypes.from_dict({field: list(wrong) if isinstance(wrong, tuple) else wrong})
    for given in (OfTwoTypes(layers=(0, 1), power=0.5), OfTwoTypes(power=3)):
        contracts.check_value(given)
        save_pipeline(Pipeline.from_dict({"value": given}, base="snapkv"), tmp_path / "p.yaml")
        assert load_pipeline(tmp_path / "p.yaml").value == given


def test_fields_that_no_file_can_hold_are_named():
    @SCORERS.register("held")
    @dataclass(frozen=True)
    class Held(Scorer):
        """Holds what is no plain data."""

        inside: dataclasses.Field = dataclasses.field(default=dataclasses.fields(OfTwoTypes)[0])

        def layer(self, capture, region, memory):
            return capture.keys[:, region.start : region.end].float().norm(dim=-1)

    with pytest.raises(AssertionError, match="are not plain data"):
        contracts.check(Held())


def test_a_precision_that_takes_more_bytes_than_it_says_is_found():
    @PRECISIONS.register("late_exact")
    class LateExact(Precision):
        """4 bits, but 16 for the region's last tokens."""

        codings = UniformPrecision(bits=4).codings

        def entry_bytes(self, dim, itemsize, spans):
            return UniformPrecision(bits=4, sinks=0).entry_bytes(dim, itemsize, spans)

        def widths(self, start, region):
            early = (start >= region.start) & (start < region.end - 32)
            return torch.where(early, 4, EXACT).to(torch.uint8)

    with pytest.raises(AssertionError, match="bytes of a budget of"):
        contracts.check(LateExact())


def test_codes_counted_in_entries_are_compared_with_16_bits():
    @PRECISIONS.register("entries_only")
    class EntriesOnly(Precision):
        """4 bits, but no bytes to plan with."""

        codings = UniformPrecision(bits=4).codings
        widths = UniformPrecision(bits=4).widths

    model, prompt = tiny_llama(layers=2), gracekv.Prompt.from_ids(torch.arange(90), (4, 80))
    found = []
    for precision in ("entries_only", "uniform"):
        pipeline = Pipeline.from_dict({"precision": precision}, base="snapkv")
        found.append(gracekv.compress(model, prompt, ratio=2, pipeline=pipeline).accounting)
    assert found[0].full_in_16_bits
    assert found[0].full_bytes == found[1].full_bytes


@pytest.mark.parametrize("forgets", ["rows", "codes", "length", "multiplicities"])
def test_a_backend_that_forgets_a_part_of_the_step_is_found(forgets):
    @BACKENDS.register("forgetful")
    class Forgetful(AttentionBackend):
        """Eager attention that forgets something."""

        def obstacle(self, spec):
            return None if forgets == "codes" or not spec.codings else "It reads no codes."

        def prepare(self, layer):
            if forgets == "multiplicities":
                plain = torch.zeros_like(layer.log_multiplicity)
                layer = replace(layer, log_multiplicity=plain)
            return Eager().prepare(layer.exact if forgets == "codes" else layer)

        def held_bytes(self, prepared):
            return 0

        def __call__(self, step):
            names = {forgets} & {"rows", "length"}
            return Eager()(replace(step, **dict.fromkeys(names)))

    with pytest.raises(AssertionError):
        contracts.check(Forgetful())


def test_a_scorer_that_occurs_twice_scores_each_layer_once(monkeypatch):
    layers, real = [], MeanAttention.layer
    monkeypatch.setattr(
        MeanAttention, "layer", lambda own, x, *rest: layers.append(x.number) or real(own, x, *rest)
    )
    prefill = synthetic_prefill(seed=0)
    mixed = Mixture((MeanAttention(), ValueNorm(scorer=MeanAttention())))
    mixed(prefill, prefill.spans.region(0))
    assert layers == [*range(prefill.layers)]
