"""GRKV's fit against its public code, on plain float64 tensors."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import Budget
from gracekv.fit import FITTERS, Regression
from gracekv.fit.attended import kept_attention
from gracekv.fit.regression import bounded_move, key_change
from gracekv.fit.values import ridge
from gracekv.pipeline import Pipeline
from gracekv.testing import synthetic_prefill
from support.fitting import fitted_cache


def compressed(ratio=3, **sizes):
    prefill = synthetic_prefill(**{"layers": 2, "context": 60, "question": 3, "dim": 8} | sizes)
    pipeline = dataclasses.replace(Pipeline.named("gracekv-plus"), fit=FITTERS.parse("none"))
    run = pipeline.run(prefill, Budget.ratio(ratio))
    return prefill, prefill.spans.region(run.plan.recent), run.cache


def published(q, k, v, mutable, target, weights, lam):
    """Uncapped changes of values and keys of one layer; q [H, G, Q, d], k and v [H, S, d]."""

    def state(keys, values):
        w = (torch.einsum("hgqd,hsd->hgqs", q, keys) / math.sqrt(k.shape[-1])).softmax(-1)
        return w, torch.einsum("hgqs,hsd->hgqd", w, values)

    w, out = state(k, v)
    heads, groups, queries, slots = w.shape
    root = weights.sqrt().repeat(groups)
    a = (w * mutable[:, None, None]).reshape(heads, -1, slots) * root[None, :, None]
    r = (target - out).reshape(heads, groups * queries, -1) * root[None, :, None]
    dv = a.mT @ torch.linalg.solve(a @ a.mT + lam * torch.eye(groups * queries).double(), r)
    # The full key problem: its Jacobian by automatic differentiation, head by head.
    dk = torch.zeros_like(k)
    for h in range(heads):

        def head(keys, h=h):
            logits = torch.einsum("gqd,sd->gqs", q[h], keys) / math.sqrt(k.shape[-1])
            return (logits.softmax(-1) @ v[h]).reshape(-1)

        jacobian = torch.autograd.functional.jacobian(head, k[h]).reshape(-1, *k[h].shape)
        jacobian = (jacobian * mutable[h][:, None]).flatten(1)
        scale = weights.sqrt().repeat(groups).repeat_interleave(v.shape[-1])
        jacobian, residual = jacobian * scale[:, None], (target - out)[h].reshape(-1) * scale
        gram = jacobian @ jacobian.T + lam * torch.eye(len(jacobian)).double()
        dk[h] = (jacobian.T @ torch.linalg.solve(gram, residual)).view_as(k[h])
    return dv, dk


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), group=st.integers(1, 2), lam=st.sampled_from([0.1, 1.0]))
def test_both_regressions_equal_the_public_formulas(seed, group, lam):
    prefill, region, cache = compressed(seed=seed, group=group)
    fitter, memory = Regression(penalty=lam), {}
    reference = fitter.reference(prefill.layer(0), region, memory)
    packed = cache.layers[0]
    seen = kept_attention(reference, packed, region)
    free = fitter._free(seen)
    shares = seen.shares()
    got = ridge(shares, seen.output - shares @ seen.values, seen.weights, free / lam)
    keys = key_change(seen, reference, free, lam)
    asked = reference.asked.double() * math.sqrt(8)
    for head in range(2):
        count = int(packed.lengths[head])
        own_keys, own_values, *_ = packed.head(head)
        k = torch.cat([own_keys, reference.last[head, 0][None]]).double()
        v = torch.cat([own_values, reference.last[head, 1][None]]).double()
        q = asked[head].view(1, group, -1, 8)
        target = reference.output[head].double().view(1, group, -1, 8)
        weights = torch.full((q.shape[2],), 6 / q.shape[2], dtype=torch.float64)
        mutable = free[head, : count + 1].double()[None]
        dv, dk = published(q, k[None], v[None], mutable, target, weights, lam)
        close = {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(got[head, : count + 1].double(), dv[0], **close)
        torch.testing.assert_close(keys[head, : count + 1].double(), dk[0], **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_head_moves_beyond_its_cap(dtype):
    prefill, region, cache = compressed(dtype=dtype, seed=4)
    fitter = Regression()
    seen = kept_attention(fitter.reference(prefill.layer(0), region, {}), cache.layers[0], region)
    free = fitter._free(seen)
    old = cache.layers[0].values.float()[seen.columns] * free[..., None]
    for seed in range(8):
        change = torch.randn(seen.values.shape, generator=torch.Generator().manual_seed(seed))
        moved = bounded_move(cache.layers[0].values, change, seen, free, 0.02)
        off = (moved.float()[seen.columns] * free[..., None] - old).norm(dim=(1, 2))
        assert (off <= 0.02 * old.norm(dim=(1, 2)) * (1 + 1e-6)).all()
        assert (off > 0).all()
    # A tenth of each head stays: the entries that the queries attend to.
    kept = seen.free.sum(dim=1) - free.sum(dim=1)
    assert kept.tolist() == [int(0.1 * float(x)) for x in seen.free.sum(dim=1)]


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), ratio=st.sampled_from([1.5, 4]))
def test_the_queries_outputs_never_get_worse(seed, ratio):
    prefill, region, cache = compressed(ratio, seed=seed)
    fitter = Regression()
    fitted = fitted_cache(fitter, prefill, region, cache)
    pipeline = dataclasses.replace(Pipeline.named("gracekv-plus"), fit=fitter)
    stored, better = pipeline.run(prefill, Budget.ratio(ratio)).cache, 0
    for number in range(prefill.layers):
        keys = (x.layers[number].keys for x in (stored, fitted))
        torch.testing.assert_close(*keys, rtol=1e-3, atol=1e-4)
        reference, errors = fitter.reference(prefill.layer(number), region, {}), []
        for layer in (cache.layers[number], fitted.layers[number]):
            seen = kept_attention(reference, layer, region)
            error = (seen.shares() @ seen.values - seen.output).square().sum(-1)
            errors.append(float((error * seen.weights).sum()))
        assert errors[1] <= errors[0] * (1 + 1e-5)
        better += errors[1] < errors[0]
    assert better
