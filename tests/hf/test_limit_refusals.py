"""Invalid limits, and refusals of a cache with a limit."""

import pytest
import torch

import gracekv
from gracekv import Limit
from gracekv.decode import Fitted, Guarded
from gracekv.errors import BudgetError, CacheError, ConfigError
from gracekv.testing.models import tiny_model
from support.forward_passes import fed_shapes

PROMPT = gracekv.Prompt.from_ids(torch.arange(60) * 13 % 97, (4, 50))
SMALL = {"entries_per_head": 80, "every": 16, "window": 8}
MODEL = {"positions": 16384}


TOO_SMALL = [
    ({"entries_per_head": 20}, BudgetError, "entries_per_head of at least"),
    ({"ratio": 3}, BudgetError, "no ratio works"),
    ({"kv_bytes": 4000}, BudgetError, "leaves 0 entries per head.*kv_bytes of at least"),
    ({"entries_per_head": 50, "strategy": "random"}, BudgetError, "keeps the prompt"),
    ({"entries_per_head": 50}, BudgetError, "keeps the prompt"),
    ({"entries_per_head": 50, "strategy": Guarded(Fitted())}, BudgetError, "keeps the prompt"),
    ({"entries_per_head": 50, "strategy": "attention"}, BudgetError, "have no scores"),
]


@pytest.mark.parametrize(("sizes", "error", "said"), TOO_SMALL)
def test_a_limit_below_what_must_stay_names_the_least(model, sizes, error, said):
    whole = gracekv.compress(model, PROMPT, ratio=1)
    with pytest.raises(error, match=said):
        whole.new_cache(Limit(**sizes))


def test_the_least_that_is_named_works(model):
    whole = gracekv.compress(model, PROMPT, ratio=1)
    for sizes in ({"entries_per_head": 20}, {"kv_bytes": 4000}):
        with pytest.raises(BudgetError) as failure:
            whole.new_cache(Limit(**sizes, every=16, window=8))
        name = next(iter(sizes))
        least = int(str(failure.value).split(f"{name} of at least ")[1].split()[0].strip(",;."))
        whole.new_cache(Limit(**{name: least}, every=16, window=8))
        with pytest.raises(BudgetError):
            whole.new_cache(Limit(**{name: least - 1}, every=16, window=8))


BAD_LIMITS = [
    ({"entries_per_head": 90, "every": 0}, "every takes a whole number >= 1"),
    ({"entries_per_head": 90, "window": 0}, "window takes a whole number >= 1"),
    ({"entries_per_head": 90, "strategy": "rnd"}, "Unknown decode strategy"),
    ({}, "exactly one of entries_per_head, ratio, kv_bytes; got none"),
    ({"entries_per_head": 90, "ratio": 2}, "exactly one of .*got entries_per_head, ratio"),
]


@pytest.mark.parametrize(("fields", "said"), BAD_LIMITS)
def test_bad_limits_are_refused(fields, said):
    with pytest.raises((ConfigError, BudgetError), match=said):
        Limit(**fields)


def test_modes_that_go_back_or_are_static_are_refused_before_any_token(model, result, monkeypatch):
    fed, limit = fed_shapes(model, monkeypatch), Limit(**SMALL)
    for options in ({"assistant_model": tiny_model(**MODEL)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(CacheError, match="Assisted decoding and prompt lookup"):
            result.generate_ids(40, limit=limit, **options)
    with pytest.raises(CacheError, match="static tail"):
        result.new_cache(limit).with_static_tail(64)
    assert not fed


def test_a_step_longer_than_an_interval_names_the_chunk_size(model, result):
    cache = result.new_cache(Limit(**SMALL))
    with torch.no_grad(), pytest.raises(CacheError, match="prefill_chunk_size=16"):
        model(input_ids=torch.zeros(1, 300, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize("batch", [False, True])
def test_a_used_cache_is_refused_as_such(model, result, batch):
    if batch:
        shorter = gracekv.Prompt.from_ids(PROMPT.ids[:50], (4, 45))
        result = gracekv.compress(model, [PROMPT, shorter], ratio=4)
    cache = result.new_cache(Limit(**SMALL))
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    for _ in range(2):
        model.generate(**result.inputs, past_key_values=cache, **options)
        with pytest.raises(CacheError, match=r"a fresh cache \(result.new_cache\(\)\)"):
            model.generate(**result.inputs, past_key_values=cache, **options)
        cache = cache.with_empty_tail()


def test_the_ratio_that_is_named_works(model, result):
    with pytest.raises(BudgetError) as failure:
        result.new_cache(Limit(ratio=50, every=16, window=8))
    most = str(failure.value).split("ratio of at most ")[1].split()[0]
    result.new_cache(Limit(ratio=most, every=16, window=8))
