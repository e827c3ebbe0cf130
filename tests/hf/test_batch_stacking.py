"""How a batch holds its prompts' entries, and what it refuses."""

import gc
import importlib
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gracekv
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.errors import CacheError, PromptError, ShapeError
from gracekv.testing.models import tiny_llama
from support.batches import Numbers, prompts_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=3, rope="llama3")


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(tokenizer=Numbers())


@pytest.fixture(scope="module")
def batch(model, prompts):
    return gracekv.compress(model, prompts, ratio=3)


def test_the_entries_are_stored_once(batch):
    """The prompts' own caches are views of the batch's, and so are fresh caches."""
    packed = batch.new_cache().layers[1].packed.entries
    views = [run.cache.layers[1].keys for run in batch._runs]
    assert {view.untyped_storage().data_ptr() for view in views} == {
        packed.keys.untyped_storage().data_ptr()
    }
    assert batch.new_cache().layers[1].packed.entries is packed
    cache = batch.new_cache()
    cache.update(torch.zeros(12, 2, 1, 16), torch.zeros(12, 2, 1, 16), 1)
    assert cache.layers[1].packed.entries is packed


def test_only_one_prefill_is_held_at_a_time(model, prompts, monkeypatch):
    module = importlib.import_module("gracekv.hf.capture")
    capture, alive, seen = module.run_capture, [], []

    def watched(*args, **options):
        gc.collect()
        seen.append(sum(ref() is not None for ref in alive))
        prefill = capture(*args, **options)
        alive.extend(weakref.ref(x) for x in (*prefill.queries, *prefill.keys))
        return prefill

    monkeypatch.setattr(module, "run_capture", watched)
    gracekv.compress(model, prompts, ratio=3, capture=gracekv.CaptureOptions(stream=False))
    assert seen == [0, 0, 0]


def masked(batch, change):
    mask = batch.inputs["attention_mask"].clone()
    change(mask)
    return mask


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (lambda b: {"attention_mask": masked(b, lambda m: m.fill_(1))}, "not hide the padding"),
        (
            lambda b: {"attention_mask": masked(b, lambda m: m[2, 7].fill_(0))},
            "hides tokens of the compressed prompt",
        ),
        (lambda b: {"attention_mask": torch.ones(3, 1, 1, 1).bool()}, "needs position_ids"),
        (lambda b: {"position_ids": torch.full((3, 1), 149)}, r"at positions \[89, 60, 149\]"),
        (lambda b: {"input_ids": torch.ones(4, 1, dtype=torch.int64)}, "holds 3 prompts"),
        (lambda b: {"attention_mask": torch.ones(3, 40)}, "up to position 39"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused(model, batch, kwargs, message):
    ids = {"input_ids": torch.ones(3, 1, dtype=torch.int64)}
    with pytest.raises(CacheError, match=message), torch.no_grad():
        model(past_key_values=batch.new_cache(), **ids | kwargs(batch))


def test_rows_that_do_not_share_out_are_refused_without_padding_too(model):
    batch = gracekv.compress(model, prompts_of(1, [(70, 2, 60), (70, 9, 55)]), ratio=3)
    with pytest.raises(CacheError, match="holds 2 prompts, the model was given 3 rows"):
        batch.new_cache().update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16), 0)


def test_bad_lists_are_refused(model, prompts):
    with pytest.raises(PromptError, match="at least one; got an empty list"):
        gracekv.compress(model, [], ratio=2)
    with pytest.raises(PromptError, match="takes a list of Prompts or one Prompt"):
        gracekv.compress(model, ["text"], ratio=2)
    with pytest.raises(PromptError, match="must share one tokenizer"):
        gracekv.compress(model, [prompts[0], *prompts_of()], ratio=2)


@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_stacking_and_taking_apart_are_inverse(seed, counts):
    rng = torch.Generator().manual_seed(seed)
    caches = [
        RaggedCache(
            (RaggedEntries.dense(*torch.randn(2, 2, count, 4, generator=rng)),) * 2, length=count
        )
        for count in counts
    ]
    stacked = RaggedCache.stack(caches)
    assert stacked.sequences == len(counts)
    assert stacked.length == max(counts)
    assert RaggedCache.stack([stacked, stacked]).padding == 2 * stacked.padding
    for number, cache in enumerate(caches):
        again = stacked.sequence(number)
        assert (again.length, again.padding) == (cache.length, (0,))
        for one, two in zip(again.layers, cache.layers, strict=True):
            for name in ("keys", "values", "positions", "log_multiplicity", "offsets"):
                assert torch.equal(getattr(one, name), getattr(two, name))
            for g in range(2):
                assert torch.equal(stacked.layers[0].head(g, number)[0], cache.layers[0].head(g)[0])


def test_layers_that_do_not_fit_are_not_stacked():
    one, two = torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 3, 4)
    with pytest.raises(ShapeError, match="same heads"):
        RaggedEntries.stack([RaggedEntries.dense(*one), RaggedEntries.dense(*two)])
    with pytest.raises(ShapeError, match="4 rows for 3 sequences"):
        RaggedEntries(*(torch.zeros(0, 4),) * 2, *(torch.zeros(0),) * 2, torch.zeros(5).long(), 3)
    layer = RaggedEntries.dense(*one)
    with pytest.raises(ShapeError, match="as many sequences"):
        RaggedCache((layer,), 3, (0, 1))
    with pytest.raises(ShapeError, match="its least is 0"):
        RaggedCache((layer,), 3, (1,))
