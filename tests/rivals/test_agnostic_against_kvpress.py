"""Rivals that score by keys, values and all queries, against kvpress's press modules."""

import dataclasses

import pytest
import torch

from gracekv.registry import Registry
from gracekv.value import Compactor, Critical, LagRelative, Scorer
from gracekv.value.critical import WrittenNorms
from support.covering import LONG
from support.kvpress_cases import RATIOS, assert_same_kept, exactly, ours, theirs, true_scores
from support.margins import assert_same_choice, indicator

# Their scores and ours differ by rounding, relative to scores of about 1.
MARGIN = 2e-4


def assert_keeps_the_same(case, recipe, press, window=0, least=1, shift=False, **changes):
    """At all ratios the kept tokens have the press's largest scores, up to near ties."""
    scores = true_scores(case, press)
    if shift:  # z-scores near 0 have no relative margin
        scores = scores - scores.amin() + 1
    for ratio in RATIOS:
        entries = max(case.entries(ratio), least)
        want = torch.zeros_like(scores, dtype=torch.bool)
        want.scatter_(-1, scores.topk(entries, dim=-1).indices, True)
        kept, _ = ours(case, recipe, entries, window, quota="per_head", **changes)
        got = indicator(kept, case.length).view(want.shape)
        assert_same_choice(got, want, scores, margin=MARGIN)


@pytest.mark.parametrize("name", ["Knorm", "KeyDiff"])
def test_key_methods(case, kvpress_module, name):
    module = kvpress_module(f"presses.{name.lower()}_press")
    assert_keeps_the_same(case, name.lower(), getattr(module, f"{name}Press")())


def test_expected_attention(case, kvpress_module):
    for block in case.model.model.layers:  # where the press looks for it
        block.self_attn.rotary_emb = case.model.model.rotary_emb
    press = kvpress_module("presses.expected_attention_press").ExpectedAttentionPress
    assert_keeps_the_same(case, "expected-attention", press(), value="expected_attention")
    adaptive = kvpress_module("presses.adakv_press").AdaKVPress  # as its authors run it
    for ratio in RATIOS:
        n = case.entries(ratio)
        kept, scores = ours(case, "expected-attention", n, window=0)
        stage = press(exactly(n, case.length), epsilon=1e-2)
        true = iter(true_scores(case, stage))
        stage.score = lambda *_, true=true: next(true)[None]  # `theirs` puts positions into values
        assert_same_kept(kept, theirs(case, adaptive(stage)), scores, across_heads=True)


def test_tova(case, kvpress_module):
    # The press always keeps the last token, which is a window of one.
    assert_keeps_the_same(case, "tova", kvpress_module("presses.tova_press").TOVAPress(), window=1)


@pytest.mark.parametrize("lag", [16, 45])
def test_lagkv(case, kvpress_module, lag):
    press = kvpress_module("presses.lagkv_press").LagKVPress(lag_size=lag)
    # In the press, tokens that are always kept tie.
    always = (case.length - press.n_sink) % lag + lag + press.n_sink
    assert_keeps_the_same(case, "lagkv", press, least=always, value=LagRelative(lag=lag))


@pytest.mark.parametrize("blending", [0.5, 20.0] if LONG else [0.5])
def test_compactor(case, kvpress_module, monkeypatch, blending):
    dim = case.prefill.head_dim
    # Whole chunks, since the press includes padding, and a sketch that leaves keys unchanged.
    chunk = (case.length - 8) // 2
    press = kvpress_module("presses.compactor_press").CompactorPress(
        sink_size_end=0, chunk_size=chunk, sketch_dimension=dim, blending=blending
    )
    unsketched = torch.eye(dim).expand(1, case.prefill.kv_heads, dim, dim) * dim**0.5
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: unsketched)
    # Its 8 sinks tie with the best other token and are kept at every ratio, like ours.
    value = Compactor(blending=blending, chunk_size=chunk)
    assert_keeps_the_same(case, "compactor", press, shift=True, value=value)


@Registry("own", "scores for tests").register("drawn")
class Drawn(Scorer):
    """Scores that depend on the seed alone, so that no two tokens tie."""

    seed: int = 0

    def layer(self, capture, region, memory):
        return self.of(capture.info)[capture.number, :, region.start : region.end]

    def of(self, prefill):
        shape = (prefill.layers, prefill.kv_heads, prefill.spans.length)
        return torch.rand(shape, generator=torch.Generator().manual_seed(self.seed))


@pytest.mark.parametrize("first_stage", [0.0, 0.5, 0.9] if LONG else [0.5])
@torch.no_grad()
def test_criticalkv(case, kvpress_module, first_stage):
    """The norms equal theirs, and with the same scores and norms, so do the kept tokens."""
    module = kvpress_module("presses.criticalkv_press")
    drawn = Drawn()
    scores = drawn.of(case.prefill)

    class Inner(module.ScorerPress):
        def score(self, attention, *rest):
            return scores[attention.layer_idx][None]

    norm = module.CriticalKVPress.vwl1norm
    both = zip(case.model.model.layers, case.prefill.values, strict=True)
    norms = torch.stack([norm(values[None], block.self_attn)[0] for block, values in both])
    own = case.prefill.observation(WrittenNorms())
    torch.testing.assert_close(own, norms, rtol=1e-4, atol=1e-5)
    prefill = dataclasses.replace(case.prefill, observed={WrittenNorms(): norms})
    case = dataclasses.replace(case, prefill=prefill)
    press = module.CriticalKVPress(Inner(), first_stage_ratio=first_stage)
    for ratio in RATIOS:
        entries = case.entries(ratio)
        press.compression_ratio = 1 - (entries + 1e-6) / case.length
        want = true_scores(case, press).topk(entries, dim=-1).indices.flatten(0, 1).sort(-1).values
        value = Critical(drawn, first_stage=first_stage)
        kept, _ = ours(case, "critical-snapkv", entries, window=0, value=value)
        # Exact: both multiply the same numbers, and no two are equal.
        assert kept == [set(head) for head in want.tolist()]
