"""Decoding over a preallocated tail equals decoding over a growing one, token by token."""

import pytest
import torch
from transformers import CompileConfig

import gracekv
from gracekv.errors import CacheError
from gracekv.registry.hyperparameter import parts_of
from gracekv.testing.models import tiny_model
from support.greedy_decoding import plain_answer
from support.margins import assert_same_beams
from support.static_tails import assert_same_answer, prompts, steps

MODEL = {"layers": 2}


@pytest.fixture(params=["eager", "sdpa", "numba"])
def result(request, model):
    return gracekv.compress(model, prompts(80)[0], ratio=4, backend=request.param)


def same(logits, want):
    """Equal up to the order of sums, which the number of masked places may change."""
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


def test_each_step_equals_the_growing_tail_also_past_the_first_capacity(model, result):
    ids = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    want = steps(model, result.new_cache(), ids)

    same(steps(model, result.new_cache().with_static_tail(8), ids), want)


@pytest.mark.parametrize("result", ["eager", "sdpa"], indirect=True)
def test_nothing_of_the_packed_part_is_copied_by_a_compiled_step_s_graph(result):
    for layer in result.new_cache().with_static_tail(8).layers:
        tensors = [x for x in parts_of(layer.packed.prepared) if isinstance(x, torch.Tensor)]
        assert tensors
        assert all(x._dynamo_static_input_type == "unguarded" for x in tensors)


def test_places_are_not_tokens_of_a_sliding_window():
    sliding = tiny_model("mistral", window=64)
    result = gracekv.compress(sliding, gracekv.Prompt.from_ids(torch.arange(60), (4, 56)), ratio=2)
    with gracekv.attached(sliding):
        want = steps(sliding, result.new_cache(), torch.arange(3)[None])
        same(steps(sliding, result.new_cache().with_static_tail(16), torch.arange(3)[None]), want)


def test_a_batch_of_prompts_with_padding(model, batch):
    ids = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(2))
    want = steps(model, batch.new_cache(), ids)

    cache = batch.new_cache().with_static_tail(12)
    same(steps(model, cache, ids), want)
    cache.batch_select_indices(torch.tensor([2, 0, 1]))
    cache.reset()
    same(steps(model, cache, ids), want)


def test_several_tokens_in_one_step_then_crop(model, result):
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(3))
    caches = result.new_cache(), result.new_cache().with_static_tail(16)
    with torch.no_grad():
        outputs = [model(ids, past_key_values=cache).logits for cache in caches]
        same(outputs[1], outputs[0])
        for cache in caches:
            cache.crop(-4)
        assert int(caches[1].get_seq_length()) == caches[0].get_seq_length()
        outputs = [model(ids[:, :3], past_key_values=cache).logits for cache in caches]
    same(outputs[1], outputs[0])


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_over_a_static_cache(model, result, options):
    cache = result.new_cache().with_static_tail(16)
    answer = plain_answer(model, result.prompt.ids, 14, past_key_values=cache, **options)
    assert_same_answer(model, result, answer)


def test_generate_compiles_over_it(model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4, backend="sdpa")
    cache = result.new_cache().with_static_tail(16)
    assert cache.is_compileable
    assert not result.new_cache().is_compileable
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    options = CompileConfig(backend=count, mode=None, fullgraph=False)
    options._compile_all_devices = True
    ids = result.prompt.ids
    answer = plain_answer(model, ids, 12, past_key_values=cache, compile_config=options)
    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)

    assert_same_answer(model, result, answer)
    assert graphs
    assert len(graphs) <= 2 * (1 + len(cache.layers)), "the step is compiled again and again"


def test_beams_over_a_static_tail(model, result):
    want, got = (
        plain_answer(model, result.prompt.ids, 10, past_key_values=each, num_beams=3)
        for each in (result.new_cache(), result.new_cache().with_static_tail(16, rows=3))
    )
    assert_same_beams(got, want, result)


def test_a_full_tail_and_other_rows_are_refused(model, result, monkeypatch):
    cache = result.new_cache().with_static_tail(3)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(3):
            model(ids, past_key_values=cache)
        with pytest.raises(CacheError, match=r"holds 3 tokens.*with_static_tail\(capacity=6\)"):
            model(ids, past_key_values=cache)
        other = result.new_cache().with_static_tail(3)
        with pytest.raises(CacheError, match=r"made for 1 rows, the model was given 2"):
            model(ids.expand(2, 1), past_key_values=other)
    with pytest.raises(CacheError, match="capacity=2"):
        cache.with_static_tail(2)
    other.reset()
    # On a GPU the layers do not check their lengths, and `generate` drops masks of ones.
    monkeypatch.setattr(type(other.layers[0]), "tail_length", property(lambda layer: 0))
    with pytest.raises(CacheError, match="holds 3 tokens since compression; this step needs 4"):
        model.generate(**result.inputs, past_key_values=other, max_new_tokens=5)
