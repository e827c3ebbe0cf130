"""DefensiveKV's score against its public code, line by line, on plain tensors."""

import dataclasses

import torch
from hypothesis import given, settings
from torch.nn import functional

from gracekv.testing import synthetic_prefill
from gracekv.value import Defensive
from gracekv.value.critical import WrittenNorms
from support.draws import ints, some


def published(attention, norms, groups, window, kernel):
    """Scores [G, N] and the first stage [G, N] of one layer; attention [H, window, N]."""
    scores = attention.view(1, groups, -1, window, attention.shape[-1])
    ave_attn_weights = scores.mean(dim=2).mean(dim=-2)
    scores_base = scores.sum(dim=-1, keepdim=True)
    pooled = functional.avg_pool1d(
        scores.view(-1, window, scores.shape[-1]), kernel, padding=kernel // 2, stride=1
    ).view(scores.shape)
    scores = (pooled / pooled.sum(dim=-1, keepdim=True)) * scores_base
    max_scores = scores.max(dim=2).values.max(dim=-2).values
    scores = max_scores.clamp(min=max_scores.mean(dim=-1, keepdim=True))
    scores = scores * (norms / norms.sum(dim=-2, keepdim=True))
    window_bias = attention[..., -window:].sum(dim=-1).mean().item()
    normalized = ave_attn_weights / ave_attn_weights.sum(dim=-1, keepdim=True)
    sorted_scores, sorted_indices = torch.sort(normalized, dim=-1, descending=True)
    mask = torch.cumsum(sorted_scores, dim=-1) >= 0.9 - window_bias
    count = torch.argmax(mask.to(torch.int32), dim=-1)
    score_mask = torch.zeros_like(normalized, dtype=torch.bool)
    for h in range(groups):
        score_mask[0, h, sorted_indices[0, h, : count[0, h]]] = True
    return scores[0], score_mask[0]


@settings(max_examples=15)
@given(
    seed=ints(0, 2**16),
    group=ints(1, 3),
    window=some([4, 8]),
    kernel=some([1, 5]),
    prefix=some([0, 9]),
)
def test_equals_the_public_code(seed, group, window, kernel, prefix):
    shape = {"context": 60 - prefix, "question": 4, "tail": 2, "prefix": prefix}
    prefill = synthetic_prefill(**shape, group=group, seed=seed)
    length = prefill.spans.length
    region = dataclasses.replace(prefill.spans.region(1), end=length - window)
    got = Defensive(window, kernel)(prefill, region).scores.double()
    for layer in range(prefill.layers):
        keys = prefill.keys[layer].double().repeat_interleave(group, dim=0)
        logits = prefill.queries[layer][:, -window:].double() @ keys.mT * prefill.scale
        logits += torch.full_like(logits, -torch.inf).triu(length - window + 1)
        attention = logits.softmax(dim=-1)[..., :-window]
        norms = prefill.observation(WrittenNorms())[layer][:, :-window].double()
        scores, first = (x[:, prefix:] for x in published(attention, norms, 2, window, kernel))
        # Tokens at the edge of the first stage may fall on either side.
        top = scores.max()
        # Above the scores of all layers, so that layers share a small budget evenly.
        assert (got[layer][first] > 2).float().mean() > 0.95
        rest = ~first & (got[layer] < top * (1 - 1e-5))
        assert rest.sum() >= (~first).sum() - 2
        torch.testing.assert_close(got[layer][rest], scores[rest], rtol=1e-4, atol=1e-8)
        # The first ones rank by mean attention.
        mean = attention.view(2, group, window, -1).mean((1, 2))[:, prefix:]
        for head in range(2):
            own = first[head].nonzero()[:, 0]
            order = own[mean[head, own].argsort(descending=True)]
            assert (got[layer, head, order].diff() <= 1e-7).all()
