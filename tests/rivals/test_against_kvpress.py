"""Our rivals against kvpress's own press modules, on the same tensors."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given

from gracekv.allocate import BudgetPlan, Pyramid
from gracekv.prefill import Region
from gracekv.registry import Registry
from gracekv.value import ColumnSums, Scorer, WindowAttention
from support.covering import covering
from support.draws import floats, ints, some
from support.kvpress_cases import RATIOS, WINDOW, assert_same_kept, exactly, ours, theirs


@pytest.mark.parametrize("ratio", RATIOS)
def test_streaming_llm(case, kvpress_module, ratio):
    press = kvpress_module("presses.streaming_llm_press").StreamingLLMPress
    n = case.entries(ratio)
    kept, _ = ours(case, "streaming-llm", n, window=1)
    # Exact: only positions decide.
    assert kept == theirs(case, press(exactly(n, case.length), n_sink=4))


@pytest.mark.parametrize(("ratio", "kernel"), covering([*product(RATIOS, [1, 5, 7])]))
def test_snapkv(case, kvpress_module, ratio, kernel):
    press = kvpress_module("presses.snapkv_press").SnapKVPress
    n = case.entries(ratio)
    value = {"name": "window_attention", "window": WINDOW, "pooling": "avg", "kernel": kernel}
    kept, scores = ours(case, "snapkv", n, value=value)
    assert_same_kept(kept, theirs(case, press(exactly(n, case.length), WINDOW, kernel)), scores)


@pytest.mark.parametrize(("ratio", "floor"), covering([*product(RATIOS, [0.0, 0.2, 0.7])]))
def test_ada_snapkv_with_the_safeguard_rule(case, kvpress_module, ratio, floor):
    snap = kvpress_module("presses.snapkv_press").SnapKVPress
    press = kvpress_module("presses.adakv_press").AdaKVPress
    n = case.entries(ratio)
    value = {"name": "window_attention", "window": WINDOW, "pooling": "avg", "kernel": 5}
    quota = {"name": "adaptive_heads", "floor": floor, "rule": "safeguard"}
    want = theirs(case, press(snap(exactly(n, case.length), WINDOW, 5), alpha_safeguard=floor))
    kept, scores = ours(case, "ada-snapkv", n, value=value, quota=quota)
    assert_same_kept(kept, want, scores, across_heads=True)


@pytest.mark.parametrize("ratio", RATIOS)
def test_chunkkv_of_whole_chunks(case, kvpress_module, ratio):
    snap = kvpress_module("presses.snapkv_press").SnapKVPress
    press = kvpress_module("presses.chunkkv_press").ChunkKVPress
    chunks, recent = case.length // 10, WINDOW // 10
    count = max(int(chunks / ratio), recent + 1)
    of = WindowAttention(WINDOW, pooling="avg", kernel=5)
    value = {"name": "chunk_order", "scorer": of.to_dict()}
    kept, ranks = ours(case, "chunkkv", WINDOW + 10 * (count - recent), value=value)
    want = theirs(case, press(snap(1 - (count + 0.5) / chunks, WINDOW, 5), chunk_length=10))
    # Chunks are ranked by the mean score of their tokens, summed over the heads.
    tokens = of(case.prefill, Region(0, case.length - WINDOW)).scores.double().sum(1, keepdim=True)
    means = tokens.unflatten(-1, (-1, 10)).mean(-1).repeat_interleave(10, dim=-1)
    scores = ranks.clone()
    scores[..., : means.shape[-1]] = means
    assert_same_kept(kept, want, scores)


@Registry("own", "scores for tests").register("average_columns")
class AverageColumns(Scorer):
    """Column sums divided by the number of queries that see the token."""

    def needs(self):
        return ColumnSums().needs()

    def layer(self, capture, region, memory):
        scores = ColumnSums().layer(capture, region, memory)
        return scores / (capture.spans.length - torch.arange(region.start, region.end))


def full_attention(case):
    """Per layer the attention [1, H, T, T], as an eager model returns it."""
    prefill = case.prefill
    later = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
    for queries, keys in zip(prefill.queries, prefill.keys, strict=True):
        shared = keys.repeat_interleave(prefill.group, dim=0)
        logits = queries @ shared.transpose(1, 2) * prefill.scale
        yield logits.masked_fill(later, -torch.inf).softmax(-1)[None]


def test_column_sums_over_their_queries_are_observed_attention(case, kvpress_module):
    press = kvpress_module("presses.observed_attention_press").ObservedAttentionPress
    attentions = list(full_attention(case))
    for ratio in RATIOS:
        n = case.entries(ratio)
        want = theirs(case, press(exactly(n, case.length)), attentions)
        kept, scores = ours(case, "h2o", n, window=0, value=AverageColumns())
        assert_same_kept(kept, want, scores)
        # Published H2O sums, which is different: never call the press H2O.
        assert ours(case, "h2o", n, window=0)[0] != want


@given(layers=some([2, 7, 28, 30, 32, 80]), length=ints(200, 20_000), share=floats(0.02, 0.95))
def test_pyramid_layer_budgets(kvpress_module, layers, length, share):
    entries = max(21, int(share * length))  # below 20 the press makes all layers equal
    press = kvpress_module("presses.pyramidkv_press").PyramidKVPress(window_size=1)
    press.compression_ratio = 1 - entries / length
    config = SimpleNamespace(num_hidden_layers=layers)
    want = [
        press.get_layer_budget(SimpleNamespace(config=config, layer_idx=layer), length)
        for layer in range(layers)
    ]
    plan = BudgetPlan(layers, heads=1, context=length, total=entries * layers, recent=0)
    got = Pyramid()(torch.zeros(layers, 1, length), plan)[:, 0].tolist()
    assert sum(got) == plan.total
    capped = max(want) >= length - 1
    halves = any(share.denominator == 2 for share in Pyramid().layer_shares(plan))
    if capped or halves:  # their cap leaves room for a window of 1; Python rounds halves to even
        assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= 1
    else:
        assert got == want
