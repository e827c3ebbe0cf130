"""A cache with a limit: its bound, positions, and modes of generation."""

import copy
import dataclasses
import gc
from functools import partial

import pytest
import torch
import transformers

import gracekv
from gracekv import Limit
from gracekv.decode import DECODERS, RKV, Fitted, Recent
from gracekv.hf.layer import GraceLayer
from gracekv.testing.models import tiny_model
from support.covering import cases
from support.families import FAMILIES
from support.margins import assert_same_tokens
from support.static_tails import steps
from support.stored_bytes import stored_bytes

MODEL = {"positions": 16384}
IDS = torch.arange(60) * 13 % 97
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 50))
TOKENS = cases(500, 4000)
EVERY = [name for name in DECODERS if name != "none"]
SMALL = {"entries_per_head": 80, "every": 16, "window": 8}


def held_bytes(cache):
    """Bytes of all tensors reachable from the cache's layers, the packed part once."""
    tensors = []
    for layer in cache.grace_layers:
        entries = layer.packed.entries
        tensors += [entries.keys, entries.values, layer._keys, layer._values]
    return stored_bytes(x for x in tensors if x is not None)


def live_bytes():
    """Bytes of all live tensors with the tiny model's head dimension."""
    gc.collect()
    everything = gc.get_objects()
    return stored_bytes(x for x in everything if type(x) is torch.Tensor and x.shape[-1:] == (16,))


def test_the_bound_holds_however_long_it_gets(model, result):
    cache = result.new_cache(Limit(entries_per_head=100, every=64, window=16, strategy="recent"))
    most = 4 * (100 + 64)
    entry = 2 * 16 * 4
    ids = IDS[cache.packed_length :][None]
    live = []
    for count in range(TOKENS):
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache).logits
        ids = logits[:, -1:].argmax(-1) if count % 3 else torch.tensor([[count % 97]])
        assert cache.accounting.entries <= most
        assert held_bytes(cache) <= most * entry
        if count % (TOKENS // 4) == TOKENS // 8:
            live.append(live_bytes())
    # Nothing else keeps the dropped entries, either.
    assert max(live) <= min(live) + most * entry
    assert cache.accounting.cuts >= TOKENS // 64 - 3
    assert cache.accounting.most_entries <= most
    tail = cache.grace_layers[0].tail_length
    assert cache.get_seq_length() == cache.packed_length + tail == TOKENS + 59


@pytest.mark.parametrize("name", EVERY)
def test_every_strategy_generates_within_bytes(model, result, name):
    cache = result.new_cache(Limit(kv_bytes="48kB", every=16, window=8, strategy=name))
    model.generate(**result.inputs, past_key_values=cache, max_new_tokens=120, do_sample=False)
    now = cache.accounting
    assert now.cuts > 2
    assert now.bytes <= now.most_bytes <= 48_000
    assert held_bytes(cache) <= 48_000


def counted(cache):
    """Entries of all layers, and bytes of their keys and values, tensor by tensor."""
    entries = size = 0
    for layer in cache.grace_layers:
        packed, tail = layer.packed.entries, layer.tail_length
        entries += packed.keys.shape[0] + layer.batch * packed.heads * tail
        parts = [packed.keys, packed.values]
        parts += [x[:, :, :tail] for x in (layer._keys, layer._values) if x is not None]
        size += sum(part.numel() * part.element_size() for part in parts)
    return entries, size


def test_accounting_says_what_is_held_now_and_was_at_most(model, result):
    plain, limited = result.new_cache(), result.new_cache(Limit(**SMALL))
    begun = plain.accounting
    assert (begun.entries, begun.bytes) == counted(plain)
    assert begun.bytes == result.accounting.bytes
    most = (0, 0)
    for number, token in enumerate(torch.arange(120) % 97):
        for cache in (plain, limited):
            with torch.no_grad():
                model(input_ids=token[None, None], past_key_values=cache)
        now, grown = limited.accounting, plain.accounting
        most = max(most, counted(limited))
        assert (now.entries, now.bytes, now.cuts) == (*counted(limited), limited.cuts)
        assert (now.most_entries, now.most_bytes) == most
        assert (grown.entries, grown.bytes) == counted(plain)
        assert (grown.most_entries, grown.most_bytes) == counted(plain)
        assert grown.entries == begun.entries + 4 * (number + 1)
    assert now.cuts > 2
    assert now.entries < now.most_entries < grown.entries


def test_accounting_counts_quantised_entries_and_rows(model):
    coded = gracekv.compress(model, PROMPT, ratio=2, pipeline=gracekv.Pipeline.named("fullkv-8bit"))
    cache = coded.new_cache()
    assert cache.accounting.bytes == coded.accounting.bytes
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 5, dtype=torch.long), past_key_values=cache)
    assert cache.accounting.bytes == coded.accounting.bytes + 3 * 5 * 4 * 2 * 16 * 4


def test_quantised_entries_are_held_in_the_models_dtype(model):
    coded = gracekv.compress(model, PROMPT, ratio=2, pipeline="gracekv-plus-allocated")
    ids = torch.zeros(1, 5, dtype=torch.long)
    caches = coded.new_cache(), coded.new_cache(Limit(**SMALL, strategy="none"))
    with torch.no_grad():
        want, got = (model(input_ids=ids, past_key_values=x).logits for x in caches)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    assert caches[1].accounting.bytes > caches[0].accounting.bytes
    limited = coded.new_cache(Limit(**SMALL))
    with torch.no_grad():
        for _ in range(12):
            model(input_ids=ids, past_key_values=limited)
    assert limited.cuts > 0
    assert limited.accounting.most_entries <= 4 * (SMALL["entries_per_head"] + SMALL["every"])


def test_none_cuts_nothing(result):
    want = result.generate_ids(60)
    assert torch.equal(result.generate_ids(60, limit=Limit(**SMALL, strategy="none")), want)


def test_none_copies_a_tail_as_seldom_as_a_cache_without_a_limit(model, result, monkeypatch):
    grown, grow = [], GraceLayer._grow
    monkeypatch.setattr(GraceLayer, "_grow", lambda *args: (grown.append(1), grow(*args)))
    for cache in map(result.new_cache, (None, Limit(**SMALL, strategy="none"))):
        grown.append(0)
        for _ in range(200):
            model(torch.tensor([[5]]), past_key_values=cache)
    assert sum(grown) == 2 * grown[1:].index(0) > 0


def masked_logits(model, ids, dropped, steps):
    """Logits of the last `steps` tokens over a full cache with `dropped` tokens masked."""
    cache = transformers.DynamicCache()
    first = len(ids) - steps
    with torch.no_grad():
        model(input_ids=ids[None, :first], past_key_values=cache)
        mask = torch.ones(1, len(ids), dtype=torch.long)
        mask[0, list(dropped)] = 0
        how = {"attention_mask": mask, "position_ids": torch.arange(first, len(ids))[None]}
        return model(input_ids=ids[None, first:], past_key_values=cache, **how).logits[0]


@pytest.mark.parametrize("rope", ["default", "yarn", "dynamic"])
def test_after_a_cut_the_model_sees_what_a_mask_leaves(rope):
    model = tiny_model(rope=rope, positions=256, original=256)
    result = gracekv.compress(model, PROMPT, ratio=1)
    cache = result.new_cache(Limit(entries_per_head=70, every=12, window=4, strategy="recent"))
    ids = torch.cat([IDS, torch.arange(34) * 7 % 97])
    logits = steps(model, cache, ids[None, 59:])[-1]
    kept = {int(x) for layer in cache.packed.layers for x in layer.positions}
    tail = cache.grace_layers[0].tail_length
    dropped = set(range(len(ids) - tail)) - kept
    assert cache.cuts == 1
    assert dropped
    # Fed at once, only tokens after the cut see the same in every layer.
    want = masked_logits(model, ids, dropped, tail)
    torch.testing.assert_close(logits[-1], want[-1], rtol=1e-3, atol=1e-4)


def logits_under(result, limit, tokens):
    """The next token's logits [V] after new tokens, fed one by one under a limit."""
    fed = torch.cat([result.prompt.ids[-1:], tokens])
    return steps(result.model, result.new_cache(limit), fed[None])[-1, 0]


SECOND_ROWS = [
    (IDS.flip(0), {"ratio": 2}, True, 80),
    # A row that is kept whole has no scores. This one is never cut; the first is, by its own.
    (IDS[:20], {"entries_per_head": 42}, False, 40),
]


@pytest.mark.parametrize(("other", "budget", "keep_prompt", "new"), SECOND_ROWS)
def test_batches_cut_each_row_by_itself(model, other, budget, keep_prompt, new):
    prompts = [gracekv.Prompt.from_ids(ids, (4, len(ids) - 10)) for ids in (IDS, other)]
    # Scores round differently in a batch, which may decide near ties: this prompt has none.
    limit = Limit(entries_per_head=60, every=16, window=8, strategy=Recent(keep_prompt=keep_prompt))
    together = gracekv.compress(model, prompts, **budget).generate_ids(new, limit=limit)
    for number, prompt in enumerate(prompts):
        alone = gracekv.compress(model, prompt, **budget)
        got, want = together[number : number + 1], alone.generate_ids(new, limit=limit)
        assert_same_tokens(got, want, partial(logits_under, alone, limit))


@pytest.mark.parametrize("strategy", ["fitted", "recent"])
def test_batches_of_several_lengths_hide_their_padding_after_cuts(model, strategy):
    prompts = [gracekv.Prompt.from_ids(ids, (4, len(ids) - 10)) for ids in (IDS, IDS[:45])]
    batch = gracekv.compress(model, prompts, ratio=2)
    cache = batch.new_cache(Limit(entries_per_head=60, every=16, window=8, strategy=strategy))
    model.generate(**batch.inputs, past_key_values=cache, max_new_tokens=80, do_sample=False)
    assert cache.cuts > 2
    assert cache.padding == (0, 15)
    for layer in cache.packed.layers:
        first, second = (layer.sequence(s).positions for s in (0, 1))
        assert first.max() - second.max() == 15
        # The shorter prompt ends at 44: the first tokens of its answer are not part of it.
        assert strategy == "fitted" or not bool(((second >= 44) & (second < 59)).any())


def test_every_row_of_a_batch_has_a_limit_of_its_own(model):
    ids = torch.arange(300) * 7 % 97
    prompts = [gracekv.Prompt.from_ids(own, (4, len(own) - 10)) for own in (ids, ids[:60])]
    batch = gracekv.compress(model, prompts, ratio=6, pipeline="gracekv-plus")
    cache = batch.new_cache(Limit(ratio=2.5, every=16, window=4, strategy="attention"))
    model.generate(**batch.inputs, past_key_values=cache, max_new_tokens=100, do_sample=False)
    tail = cache.grace_layers[0].tail_length
    for row, length in enumerate((399, 159)):
        assert int(cache.packed.sequence(row).entries().sum()) / 4 + tail <= length // 2.5 + 16
    assert cache.cuts > 2


SEVERAL = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 3},
]


@pytest.mark.parametrize("options", SEVERAL)
def test_beams_and_samples_stay_within_the_limit(model, result, options):
    torch.manual_seed(0)
    before, cache = result.packed.layers[0].keys.clone(), result.new_cache(Limit(**SMALL))
    ids = model.generate(**result.inputs, past_key_values=cache, max_new_tokens=100, **options)
    assert len(ids) == options.get("num_return_sequences", 1)
    assert cache.cuts > 2
    assert cache.accounting.entries <= cache.grace_layers[0].batch * 4 * (80 + 16)
    # The part that all continuations share is unchanged.
    assert torch.equal(result.packed.layers[0].keys, before)


def test_samples_of_a_batch_may_begin_with_a_cut(model):
    prompts = [gracekv.Prompt.from_ids(ids, (4, len(ids) - 10)) for ids in (IDS, IDS[:45])]
    batch = gracekv.compress(model, prompts, ratio=2)
    cache = batch.new_cache(Limit(entries_per_head=60, every=16, window=8))
    options = {"max_new_tokens": 1, "do_sample": True, "pad_token_id": 0}
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    while cache.cuts < 2:
        cuts = cache.cuts
        two = {"past_key_values": copy.deepcopy(cache), "num_return_sequences": 2}
        assert len(model.generate(ids, attention_mask=mask, **two, **options)) == 4
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        assert cache.cuts - cuts < 2


def test_beams_that_never_reach_the_limit_are_those_without(result):
    got = result.generate_ids(40, num_beams=3, limit=Limit(entries_per_head=500, every=16))
    assert torch.equal(got, result.generate_ids(40, num_beams=3))


def test_a_copy_goes_on_as_the_cache_does(model, result):
    cache = result.new_cache(Limit(**SMALL))
    model.generate(**result.inputs, past_key_values=cache, max_new_tokens=90, do_sample=False)
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        for token in torch.arange(40) % 97:
            one = model(input_ids=token[None, None], past_key_values=cache).logits
            assert torch.equal(one, model(input_ids=token[None, None], past_key_values=twin).logits)
    assert cache.cuts == twin.cuts > 0
    assert twin._rotations is cache._rotations
    assert cache.with_empty_tail().get_seq_length() == result.packed.length


def test_saved_results_are_continued(model, result, tmp_path):
    result.save(tmp_path / "book.safetensors")
    loaded = gracekv.load(tmp_path / "book.safetensors", model)
    limit = Limit(**SMALL, strategy="rkv")
    assert torch.equal(loaded.generate_ids(100, limit=limit), result.generate_ids(100, limit=limit))


def test_a_packed_prompt_above_the_limit_is_cut_by_its_own_scores(model):
    result = gracekv.compress(model, PROMPT, ratio=1.25)
    cache = result.new_cache(
        Limit(entries_per_head=36, every=16, window=2, strategy=Fitted(keep_prompt=False))
    )
    assert cache.accounting.entries > 4 * (36 + 16) - 40
    model.generate(**result.inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.cuts == 1
    assert cache.accounting.most_entries <= 4 * (36 + 16)


def test_what_must_stay_stays_where_heads_have_equal_shares(model, result):
    pairs = [[x.head(g)[2].tolist() for g in range(2)] for x in result.packed.layers]
    counts = [len(x) for own in pairs for x in own]
    share = -(-sum(counts) // len(counts)) + 9
    assert max(counts) + 8 > share
    keeps = {"every": 16, "window": 8, "strategy": RKV(keep_prompt=True)}
    cache = result.new_cache(Limit(entries_per_head=share, **keeps))
    model.generate(**result.inputs, past_key_values=cache, max_new_tokens=90, do_sample=False)
    assert cache.cuts > 1
    for layer, own in zip(cache.grace_layers, pairs, strict=True):
        for head, before in enumerate(own):
            kept = layer.packed.entries.head(head)[2].tolist()
            assert set(before) <= {*kept}
            assert len(kept) >= len(before) + 8


@pytest.mark.parametrize("name", EVERY)
def test_a_cut_after_tokens_were_taken_back_asks_none_of_them(model, result, name):
    strategy = DECODERS.build(name)
    if name in ("attention", "fitted"):
        strategy = dataclasses.replace(strategy, queries=4)
    tokens = torch.arange(10, 24) % 97
    for taken_back, more in ((0, 0), (3, 0), (9, 0), (20, 3)):
        cache = result.new_cache(Limit(**{**SMALL, "every": 32}, strategy=strategy))
        with torch.no_grad():
            model(input_ids=tokens[None, : 14 - more], past_key_values=cache)
            if taken_back:
                model(input_ids=torch.full((1, taken_back), 5), past_key_values=cache)
                cache.crop(-taken_back)
            first = 14 - strategy.queries
            oldest = max(0, first, min(14 - more, first - more + taken_back))
            if more:
                model(input_ids=tokens[None, 14 - more :], past_key_values=cache)
            assert cache.grace_layers[0].row_queries(0)[1].tolist() == list(range(oldest, 14))
            cache._cut(None)
        assert cache.cuts == 1
        assert cache.get_seq_length() == cache.packed_length == result.packed.length + 14


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3_text", "lfm2", "glm4", "smollm3"])
def test_other_families_generate_within_the_limit(family):
    model = FAMILIES[family].model(vocabulary=97)
    result = gracekv.compress(model, PROMPT, ratio=2)
    cache = result.new_cache(Limit(entries_per_head=50, every=16, window=8))
    model.generate(**result.inputs, past_key_values=cache, max_new_tokens=60, do_sample=False)
    assert cache.cuts > 1
    assert cache.get_seq_length() == 60 + 60 - 1
