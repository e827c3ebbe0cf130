"""A cache is found under both keywords that versions of transformers use."""

from gracekv.prefill.cache_keyword import NAMES, cache_keyword, given_cache


def test_both_keywords_of_a_cache_are_known():
    cache = object()
    assert [given_cache({"use_cache": True, name: cache}) for name in NAMES] == [cache, cache]
    assert cache_keyword(lambda cache=None: 0) == "cache"
    assert cache_keyword(lambda past_key_values=None: 0) == "past_key_values"
