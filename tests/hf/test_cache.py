"""The cache's own behaviour: lengths, growth, cropping, and refusals."""

import pytest
import torch

import gracekv
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.errors import CacheError
from gracekv.hf import GraceCache, attach
from gracekv.hf.layer import PackedStates
from gracekv.testing.models import tiny_llama, tiny_model

PACKED = 30


def packed():
    states = torch.randn(2, 2, 2, PACKED, 16, generator=torch.Generator().manual_seed(0))
    return RaggedCache(tuple(RaggedEntries.dense(*layer) for layer in states), length=PACKED)


def tiny(**fields):
    model = tiny_llama(**fields)
    attach(model)
    return model


@pytest.fixture
def model():
    return tiny()


def feed(cache, count, rows=1, seed=0):
    keys = torch.randn(2, rows, 2, count, 16, generator=torch.Generator().manual_seed(seed))
    return keys, [cache.update(keys[0], keys[1], layer)[0] for layer in range(len(cache))]


def test_lengths_follow_the_logical_tokens():
    cache = GraceCache(packed())
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (PACKED, (3, PACKED))
    feed(cache, 3)
    assert (cache.get_seq_length(), cache.get_mask_sizes(1, 1)) == (PACKED + 3, (4, PACKED))
    assert cache.get_max_length() == -1
    assert repr(cache) == "GraceCache(packed_length=30, tail=3, layers=2)"


def test_growth_leaves_unused_places_unread(model):
    """NaN behind the tail must never reach a result."""
    cache = GraceCache(packed())
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), past_key_values=cache)
        for layer in cache.layers:
            layer._keys[:, :, 2:] = layer._values[:, :, 2:] = torch.nan
        logits = model(torch.tensor([[3, 4]]), past_key_values=cache).logits
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("rows", [1, 2])
def test_a_tail_of_few_rows_serves_several(rows):
    cache = GraceCache(packed())
    first, _ = feed(cache, 2, rows=rows)
    second, handles = feed(cache, 1, rows=3 * rows, seed=1)
    expected = torch.cat([first[0].repeat_interleave(3, dim=0), second[0]], dim=2)
    assert torch.equal(handles[0].keys, expected)


def test_cropping_stops_at_the_packed_part():
    cache = GraceCache(packed())
    keys, _ = feed(cache, 5)
    cache.crop(-2)
    cache.crop(0)
    assert cache.get_seq_length() == PACKED + 3
    again, handles = feed(cache, 1, seed=1)
    assert torch.equal(handles[0].keys, torch.cat([keys[0][:, :, :3], again[0]], dim=2))
    with pytest.raises(CacheError, match="Only the 4 tokens since compression"):
        cache.crop(-5)
    with pytest.raises(CacheError, match="minus the number of tokens"):
        cache.crop(3)


def test_a_reset_or_new_cache_starts_over():
    cache = GraceCache(packed())
    feed(cache, 5)
    twin = cache.with_empty_tail()
    assert (twin.get_seq_length(), cache.get_seq_length()) == (PACKED, PACKED + 5)
    assert twin.layers[0].packed is cache.layers[0].packed
    cache.reset()
    assert cache.get_seq_length() == PACKED


@pytest.mark.parametrize("entries", [None, 200])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_cache_from_inference_mode_can_go_on_outside(family, entries):
    model, prompt = tiny_model(family), gracekv.Prompt.from_ids(torch.arange(60), (4, 50))
    with torch.inference_mode():
        result = gracekv.compress(model, prompt, ratio=2)
        cache = result.new_cache(entries and gracekv.Limit(entries_per_head=entries))
        model(torch.tensor([[59, 1]]), past_key_values=cache)
    with torch.no_grad():
        model(torch.tensor([[3]]), past_key_values=cache)
    model(torch.tensor([[4]]), past_key_values=cache)  # with gradients, which end at the cache
    assert cache.get_seq_length() == 63


@pytest.mark.parametrize("masked", [False, True])
def test_one_token_at_a_wrong_position_is_refused(masked):
    model = tiny_llama()
    result = gracekv.compress(model, gracekv.Prompt.from_ids(torch.arange(60), (4, 50)), ratio=2)
    step = {"input_ids": torch.tensor([[59]])}
    if masked:
        step["attention_mask"] = torch.ones(1, 60, dtype=torch.int64)
    right = torch.tensor([[59]])
    model(**step, position_ids=right, past_key_values=result.new_cache())
    for wrong in (right - 1, right + 1, right * 0):
        with pytest.raises(CacheError, match=r"position"):
            model(**step, position_ids=wrong, past_key_values=result.new_cache())


def test_a_model_in_training_is_refused():
    model = tiny_llama()
    result = gracekv.compress(model, gracekv.Prompt.from_ids(torch.arange(60), (4, 50)), ratio=2)
    model.train()
    with pytest.raises(CacheError, match=r"LlamaModel is in training mode.*eval"):
        model.generate(**result.inputs, past_key_values=result.new_cache(), max_new_tokens=2)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_an_unattached_model_says_what_to_do(base):
    model = tiny_llama(attention=base)
    with pytest.raises(CacheError, match=r"gracekv\.hf\.attach\(model\)"), torch.no_grad():
        model(torch.tensor([[1, 2]]), past_key_values=GraceCache(packed()))


def test_a_handle_cannot_be_computed_with():
    handle = GraceCache(packed()).update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)[0]
    assert isinstance(handle, PackedStates)
    uses = (lambda: handle.shape, lambda: torch.ones(1) @ handle, lambda: torch.cat([handle]))
    for use in (*uses, lambda: handle[0]):
        with pytest.raises(CacheError, match="attach"):
            use()


def ones(*shape):
    return torch.ones(shape, dtype=torch.int64)


def call(**kwargs):
    return lambda model: model(
        **({"input_ids": ones(1, 2), "past_key_values": GraceCache(packed())} | kwargs)
    )


def generate(**kwargs):
    def run(model):
        options = {"inputs": ones(1, PACKED + 1), "attention_mask": ones(1, PACKED + 1)}
        options |= {"past_key_values": GraceCache(packed()), "max_new_tokens": 3, "pad_token_id": 0}
        model.generate(**options | kwargs)

    return run


def twice(model):
    cache = GraceCache(packed())
    feed(cache, 2, rows=2)
    model(ones(3, 1), past_key_values=cache)


def as_if_fresh(model):
    """Start anew with a cache that has already been used for generation."""
    cache = GraceCache(packed())
    generate(past_key_values=cache)(model)
    generate(past_key_values=cache)(model)


@pytest.mark.parametrize(("use", "message"), [
    (as_if_fresh, "up to position 30, but with them the cache covers"),
    # The whole prompt is packed: transformers would silently feed all of it again.
    (generate(inputs=ones(1, PACKED), attention_mask=ones(1, PACKED)),
     "up to position 29, but with them the cache covers 60"),
    (call(attention_mask=ones(1, 2)), "up to position 1, but with them the cache covers 32"),
    (call(attention_mask=(torch.arange(PACKED + 2) != 3).long()[None]),
     "hides tokens of the compressed prompt"),
    (call(attention_mask=torch.zeros(1, 1, 2, PACKED + 2)), "cover the 2 tokens"),
    (call(position_ids=torch.tensor([[0, 1]])), "up to position 1, but"),
    (call(input_ids=ones(1, 2), output_attentions=True), "output_attentions"),
    (twice, "holds 2 continuations, the model was given 3 rows"),
    (lambda model: call()(tiny(kv_heads=4)), "holds 2 KV heads of dimension 16"),
    (lambda model: call()(tiny(dtype=torch.bfloat16)), "Compress again after"),
])  # fmt: skip
def test_wrong_uses_are_refused(model, use, message):
    with pytest.raises(CacheError, match=message), torch.no_grad():
        use(model)


def test_new_padding_in_the_tail_is_hidden(model):
    """A left-padded second turn: the padded row answers as alone."""
    cache = packed()
    ids = torch.tensor([[0, 0, 5], [7, 8, 5]])
    mask = torch.ones(2, PACKED + 3, dtype=torch.int64)
    mask[0, PACKED : PACKED + 2] = 0
    positions = torch.tensor([[0, 0, PACKED], [PACKED, PACKED + 1, PACKED + 2]])
    with torch.no_grad():
        both = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=GraceCache(cache)
        ).logits
        alone = model(torch.tensor([[5]]), past_key_values=GraceCache(cache)).logits
    torch.testing.assert_close(both[0, -1], alone[0, -1], rtol=0, atol=1e-5)
