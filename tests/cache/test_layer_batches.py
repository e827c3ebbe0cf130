"""Fitting or quantising layers together gives the same as one by one."""

import pytest
import torch

from gracekv.allocate import Budget
from gracekv.cache.base import RaggedEntries
from gracekv.cache.quantised import apart
from gracekv.fit import values as fitting
from gracekv.pipeline import Pipeline
from gracekv.precision import base as precision
from gracekv.testing import synthetic_prefill
from support.same_results import assert_same_entries


def test_layers_come_apart_in_memory_of_their_own():
    rng = torch.Generator().manual_seed(0)
    states = [torch.randn(2, count, 4, generator=rng) for count in (5, 1, 9)]
    layers = [RaggedEntries.dense(x, x + 1) for x in states]
    for layer, own in zip(layers, apart(RaggedEntries.stack(layers), 3), strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(own.tensors()[name], tensor)
            assert own.tensors()[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_quantised_together_as_alone(monkeypatch, dtype):
    prefill = synthetic_prefill(context=300, layers=4, dim=16, dtype=dtype, group=2, seed=3)
    recipe = {"precision": {"name": "allocated", "group": 8}, "fit": "none"}
    pipeline = Pipeline.from_dict(recipe, base="gracekv-plus")
    alone, calls = pipeline.run(prefill, Budget.ratio(3)).cache, []

    def all_together(layers, size, limit):
        calls.append(sum(map(size, layers)))
        yield slice(0, len(layers))

    monkeypatch.setattr(precision, "batches", all_together)
    together = pipeline.run(prefill, Budget.ratio(3)).cache
    assert len(calls) == 2, "the keys as read, and all codes"
    assert_same_entries(together, alone)


@pytest.mark.parametrize("fit", ["values", "values_and_mass", "least_squares"])
def test_a_stack_of_layers_is_fitted_as_each_of_them(monkeypatch, fit):
    prefill = synthetic_prefill(context=120, layers=3, dim=8, group=2, seed=1)
    pipeline = Pipeline.from_dict({"fit": fit}, base="gracekv-plus")
    run = Pipeline.from_dict({"fit": "none"}, base="gracekv-plus").run(prefill, Budget.ratio(3))
    region, memory = prefill.spans.region(run.plan.recent), {}
    asked = prefill.with_queries(pipeline.fit.asks(prefill, region, memory))

    def fitted():
        references = [pipeline.fit.reference(asked.layer(n), region, memory) for n in range(3)]
        made = pipeline.fit.layers(run.cache, references, region).layers
        assert not references
        return made

    alone = fitted()
    monkeypatch.setattr(fitting, "batches", lambda layers, *_: [slice(0, 2), slice(2, 3)])
    for one, two, packed in zip(alone, fitted(), run.cache.layers, strict=True):
        assert two.keys is packed.keys, "what stays is not copied"
        assert two.values.untyped_storage().nbytes() == packed.values.nbytes
        assert torch.equal(one.positions, two.positions)
        torch.testing.assert_close(one.values, two.values, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.log_multiplicity, two.log_multiplicity, rtol=1e-3, atol=1e-4)
