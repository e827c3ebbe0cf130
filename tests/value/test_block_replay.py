"""Context queries moved to the end of their block, against a plain reference."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.errors import MissingCaptureError
from gracekv.kernels.rope import Rope
from gracekv.prefill import Needs, Region
from gracekv.value import BlockReplay, block_replay
from gracekv.value.block_replay import BlockReplaySums, near_logits
from support.draws import SEEDS, ints, some
from support.lean_prefills import small, without_queries


@settings(max_examples=15)
@given(
    seed=SEEDS,
    past=ints(1, 12),
    context=ints(1, 24),
    block=ints(1, 26),
    near=ints(0, 26),
    beyond=some([2, 256]),
)
def test_a_passage_equals_its_reference(seed, past, context, block, near, beyond):
    """Queries see all earlier entries and are moved beyond the passage; the entries get scores."""
    prefill = small(seed=seed, prefix=past + 1, context=context)
    spans = dataclasses.replace(prefill.spans, past=past)
    prefill = dataclasses.replace(prefill, spans=spans, observed={})
    scorer, region = BlockReplay(block, 3.0, near, 0.5), Region(past + 1, past + 1 + context)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_replay, "_BEYOND", beyond)
        prefill = prefill.with_observations(scorer.needs().observers)
    # Between the entries and the passage is a last token, which is not scored.
    every = [scorer.with_past(layer, region, {}) for layer in prefill]
    want = passage_scores(prefill, scorer, beyond)
    places = slice(past + 1, region.end), slice(past)
    for got, at in zip(zip(*every, strict=True), places, strict=True):
        torch.testing.assert_close(torch.stack(got).double(), want[..., at], rtol=2e-4, atol=1e-6)


def passage_scores(prefill, scorer, beyond):
    """[L, G, T] float64, query by query."""
    spans, total = prefill.spans, torch.zeros(*prefill.keys[0].shape[:2]).double()
    total = total.repeat(prefill.layers, 1, 1)
    for layer in range(prefill.layers):
        rope = prefill.rope_of(layer).double()
        for head in range(prefill.query_heads):
            keys, following = prefill.keys[layer][head // prefill.group].double(), []
            for u in range(spans.context_start, spans.context_end):
                start = u - (u - spans.context_start) % scorer.block
                end = min(start + scorer.block, spans.context_end)
                query = prefill.queries_at(layer, [u])[head].double()
                angle = Rope.of_theta(200, query.shape[1]).double()
                plain = rope.unrotate(query, torch.tensor([u]))
                further = end - 1 + min(beyond, end - 1 - start)
                moved = angle.rotate(plain, torch.tensor([further]))[0]
                lead = max(4, spans.past)
                first = end - scorer.block if end - scorer.block > lead else 0
                asked = [t for t in range(end) if t < lead or t >= first]
                near = keys[max(start, u - scorer.near + 1) : u + 1]
                logits = prefill.scale * torch.cat([keys[asked] @ moved, near @ query[0]])
                row = logits.softmax(0)[: len(asked)]
                # First tokens that only stand in for all others get no score.
                row = row * torch.tensor([t >= first or t < spans.past for t in asked])
                total[layer, head // prefill.group, asked] += row**3 / prefill.group
                if u < end - 1 and start == spans.context_start:
                    following.append(row[asked.index(u + 1)])
            if following:
                read = scorer.induction * torch.stack(following).mean() ** 3 / prefill.group
                total[layer, head // prefill.group, spans.context_start :] += read
    return (total / spans.context_length).pow(1 / 3)


@pytest.mark.parametrize("near", [1, 5, 128, 300])
def test_near_logits_are_a_band(near):
    rng = torch.Generator().manual_seed(3)
    queries, keys = torch.randn(4, 290, 8, generator=rng), torch.randn(2, 290, 8, generator=rng)
    logits = queries.double() @ keys.double().repeat_interleave(2, dim=0).mT
    ago = torch.arange(290)[:, None] - torch.arange(290)
    logits.masked_fill_((ago < 0) | (ago >= near), -torch.inf)
    got = near_logits(queries, keys, near)
    torch.testing.assert_close(got.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_captured_sums_are_read():
    prefill, region = small(), Region(2, 22)
    scorer = BlockReplay(8)
    plain = scorer(prefill, region).scores
    (sums,) = scorer.needs().observers
    captured = dataclasses.replace(
        without_queries(prefill), observed={sums: torch.full((2, prefill.kv_heads, 26), 20.0)}
    )
    torch.testing.assert_close(scorer(captured, region).scores, torch.ones_like(plain))
    with pytest.raises(MissingCaptureError, match="not captured"):
        BlockReplay(9)(captured, region)


def test_needs_of_two_are_both():
    both = BlockReplay(8).needs() | BlockReplay(9).needs() | Needs()
    assert both.observers == {BlockReplaySums(8, 3.0, 64), BlockReplaySums(9, 3.0, 64)}
