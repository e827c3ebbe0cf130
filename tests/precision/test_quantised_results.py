"""Quantised caches under a model: generation, batches, beams, files and reports."""

import dataclasses
import os

import pytest
import torch

import gracekv
from gracekv.cache.quantised import QuantisedEntries
from gracekv.errors import BudgetError, SavedCacheError, ShapeError
from gracekv.pipeline import Pipeline
from gracekv.testing.models import tiny_llama
from support.same_results import assert_same_accounting, assert_same_entries


def prompt(length=120, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return gracekv.Prompt.from_ids(torch.randint(0, 97, (length,), generator=rng), (4, length - 9))


ALLOCATED = {"name": "allocated"}


def pipeline(**fields):
    precision = {"name": "uniform", "group": 8, **fields}
    return Pipeline.from_dict({"precision": precision}, base="gracekv-plus")


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=3)


@pytest.mark.parametrize("backend", ["auto", "numba", "sdpa", "eager"])
@pytest.mark.parametrize("fields", [{"bits": 4}, ALLOCATED])
def test_generation_reads_what_the_codes_say(model, backend, fields):
    coded = pipeline(**fields)
    result = gracekv.compress(model, prompt(), ratio=3, pipeline=coded, backend=backend)
    plain = gracekv.cache.dequantised(result.packed)
    cache = gracekv.hf.GraceCache(plain, Pipeline.named("gracekv").backend)
    ids, logits = result.inputs["input_ids"], []
    asked = {"position_ids": torch.tensor([[ids.shape[1] - 1]]), "use_cache": True}
    for each in (result.new_cache(), cache):
        with torch.no_grad():
            logits.append(model(ids[:, -1:], past_key_values=each, **asked).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, ALLOCATED])
def test_batches_and_beams(model, fields):
    prompts = [prompt(120), prompt(90, seed=1), prompt(30, seed=2)]
    batch = gracekv.compress(model, prompts, ratio=2, pipeline=pipeline(**fields))
    alone = [gracekv.compress(model, one, ratio=2, pipeline=pipeline(**fields)) for one in prompts]
    for number, one in enumerate(alone):
        own = batch.packed.sequence(number)
        assert_same_entries(own, one.packed)
        assert all(isinstance(layer, QuantisedEntries) for layer in own.layers)
    assert batch.generate_ids(6).shape == (3, 6)
    assert batch.generate_ids(4, num_beams=3).shape == (3, 4)
    assert batch.generate_ids(4, num_beams=2, num_return_sequences=2).shape == (6, 4)
    assert batch.accounting.bytes == sum(x.accounting.bytes for x in alone)
    assert batch.accounting.widths == gracekv.cache.WidthShare.summed(
        share for x in alone for share in x.accounting.widths
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fields", [{}, {"bits": 4}, ALLOCATED])
def test_files_hold_what_is_accounted_for(tmp_path, dtype, fields):
    model = tiny_llama(layers=2, dtype=dtype)
    result = gracekv.compress(model, prompt(), ratio=2, pipeline=pipeline(**fields))
    path = tmp_path / "cache"
    result.save(path)
    kept = result.accounting
    # In addition to the entries, there are the ids (8 bytes each) and a header.
    assert 0 < os.path.getsize(path) - kept.bytes - kept.metadata_bytes - 8 * 120 < 20_000
    assert kept.held_bytes["cpu"] >= kept.bytes + kept.metadata_bytes

    again = gracekv.load(path, model)

    assert_same_entries(again.packed, result.packed)
    assert_same_accounting(again.accounting, kept)
    assert torch.equal(again.generate_ids(5), result.generate_ids(5))


def test_a_file_with_codes_that_cannot_be_is_refused(model, tmp_path, monkeypatch):
    result = gracekv.compress(model, prompt(), ratio=3, pipeline=pipeline())
    layer = result.packed.layers[0]
    (part,) = layer.coded
    broken = {
        "scales": dataclasses.replace(part.keys, scale=torch.full_like(part.keys.scale, torch.nan)),
        "types": dataclasses.replace(part.keys, codes=part.keys.codes.to(torch.int8)),
    }
    for number, keys in enumerate(broken.values()):
        spoiled = dataclasses.replace(layer, coded=(dataclasses.replace(part, keys=keys),))
        layers = (spoiled, *result.packed.layers[1:])
        path = tmp_path / str(number)
        with monkeypatch.context() as patch:
            cache = gracekv.cache.CompressedCache(layers, result.packed.length)
            patch.setattr(type(result), "packed", property(lambda _, cache=cache: cache))
            result.save(path)
        with pytest.raises(SavedCacheError, match="does not hold a whole cache"):
            gracekv.load(path, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{}, {"bits": 4}, ALLOCATED])
def test_ratio_1_of_a_16_bit_model_is_the_full_cache_bit_for_bit(dtype, fields):
    model = tiny_llama(layers=2, dtype=dtype)
    result = gracekv.compress(model, prompt(), ratio=1, pipeline=pipeline(**fields))
    full = gracekv.compress(model, prompt(), ratio=1, pipeline="fullkv")
    for layer, own in zip(result.packed.layers, full.packed.layers, strict=True):
        assert not any(part.entries for part in layer.coded)
        assert layer.exact.dtype == dtype
        torch.testing.assert_close(layer.exact.tensors(), own.tensors(), rtol=0, atol=0)
    assert result.accounting.bytes == full.accounting.bytes


def test_what_cannot_work_is_refused_before_the_model_runs(model, monkeypatch):
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(BudgetError, match="bytes is below the smallest"):
        gracekv.compress(model, prompt(), ratio=500, pipeline=pipeline())
    with pytest.raises(ShapeError, match="do not fit a head dimension of 16"):
        gracekv.compress(model, prompt(), ratio=2, pipeline=pipeline(group=6))
