"""CaM's replay: against plain loops, by hand, and reduced to plain eviction."""

import pytest
import torch
from hypothesis import given

from gracekv import Budget, Pipeline
from gracekv.cache import CamPacker
from gracekv.cache.cam import replayed
from gracekv.cache.reference import cam_probability, cam_replay
from gracekv.errors import MissingCaptureError
from gracekv.testing import synthetic_prefill
from gracekv.value.column_sums import ReceivedAttention
from support.draws import SEEDS, floats, ints
from support.selections import kept_positions
from support.token_pipelines import pipeline


@given(
    seed=SEEDS, length=ints(4, 80), merge=ints(1, 40), prefix=ints(0, 5), question=ints(1, 4),
    ratio=floats(1.1, 3.0),
)  # fmt: skip
def test_equals_the_plain_loop(seed, length, merge, ratio, **sizes):
    prefill = synthetic_prefill(dim=8, context=length, tail=0, seed=seed, **sizes)
    pack = CamPacker(merge=merge, seed=seed)
    whole = pipeline(pack.to_dict(), window={"size": 2, "minimum": 1})
    run = whole.run(prefill, Budget.ratio(ratio))
    n, start = prefill.spans.context_length, prefill.spans.context_start
    context = slice(start, start + n)
    columns = prefill.observe(ReceivedAttention()).double()
    for layer in range(prefill.layers):
        uniforms = pack.uniforms(prefill.kv_heads, n, layer)
        for head in range(prefill.kv_heads):
            group = columns[layer, head * prefill.group : (head + 1) * prefill.group].mean(0)
            attention = group[context].tolist()
            kept = (kept_positions(run, prefill, layer, head) - start).tolist()
            merges = [
                t not in kept and float(uniforms[head, t]) < cam_probability(attention, t, merge)
                for t in range(n)
            ]
            keys, values, positions, log_m = run.cache.layers[layer].head(head)
            want = prefill.values[layer][head].double().clone()
            want[context] = cam_replay(want[context], merges, merge)
            at = positions.long()
            torch.testing.assert_close(values.double(), want[at], rtol=2e-5, atol=2e-6)
            assert torch.equal(keys, prefill.keys[layer][head, at])
            assert not log_m.any()


@pytest.mark.parametrize("block", [1, 3, 16, 1000])
def test_blocks_change_nothing(block):
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(2, 75, 4, generator=rng)
    share = torch.rand(2, 75, generator=rng) * (torch.rand(2, 75, generator=rng) < 0.7) / 9
    torch.testing.assert_close(
        replayed(values, share, 9, block=block), replayed(values, share, 9), rtol=1e-5, atol=1e-6
    )


def test_draws_depend_on_seed_and_layer_alone():
    prefill = synthetic_prefill(context=200, layers=3, seed=1)
    first, again, other = (
        pipeline({"name": "cam", "seed": seed}).run(prefill, Budget.ratio(2)) for seed in (0, 0, 1)
    )
    pairs = list(zip(first.cache.layers, again.cache.layers, other.cache.layers, strict=True))
    assert all(torch.equal(a.values, b.values) for a, b, _ in pairs)
    assert any(not torch.equal(a.values, c.values) for a, _, c in pairs)
    pack = CamPacker()
    assert torch.equal(pack.uniforms(2, 30, 1), pack.uniforms(2, 30, 1))
    assert not torch.equal(pack.uniforms(2, 30, 1), pack.uniforms(2, 30, 2))


def test_a_streaming_base_gets_its_column_sums_from_the_pipeline():
    prefill = synthetic_prefill(context=120, seed=1)
    whole = pipeline("cam", value="recency")
    assert ReceivedAttention() in whole.needs().observers
    run = whole.run(prefill, Budget.ratio(4))
    base = pipeline("evict", value="recency").run(prefill, Budget.ratio(4))
    assert torch.equal(run.cache.layers[0].positions, base.cache.layers[0].positions)
    assert not torch.equal(run.cache.layers[0].values, base.cache.layers[0].values)


def test_coarse_nodes_keep_the_token_that_evict_keeps():
    prefill = synthetic_prefill(context=120, seed=1)
    both = (Pipeline.from_dict({"pack": name}) for name in ("cam", "evict"))
    cam, evict = (pipeline.run(prefill, Budget.ratio(6)) for pipeline in both)
    for a, b in zip(cam.cache.layers, evict.cache.layers, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.keys, b.keys)


def test_column_sums_must_be_given():
    prefill = synthetic_prefill(context=60)
    run = pipeline("evict").run(prefill, Budget.ratio(4))
    assert ReceivedAttention() not in prefill.observed
    with pytest.raises(MissingCaptureError, match="ReceivedAttention"):
        CamPacker()(prefill, run.selection, run.relevance.scores, pipeline("cam").prototype)
