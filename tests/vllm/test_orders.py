"""Requests other than questions, as they arrive over HTTP."""

import re

import pytest

from gracekv.errors import StoreError
from gracekv.vllm.header import TurnFormat
from gracekv.vllm.orders import Compression, Deletion, Listing, order_of


def compress(**fields):
    return {"compress": {"name": "book", "ratio": 4, **fields}}


def test_names_are_no_orders():
    assert order_of("book") is None
    assert order_of(["book"]) is None
    assert order_of({"list": True}) == Listing()
    assert order_of({"list": "book"}) == Listing("book")
    assert order_of({"delete": "book"}) == Deletion("book")


def test_contexts_that_are_extended_by_another_recipe_or_whole():
    def extended(own="fullkv", **fields):
        return order_of({"extend": {"name": "book", **fields}}, recipe_of=lambda name: own)

    assert extended("gracekv-agnostic-two-pass", ratio=4).recipe == "gracekv-agnostic"

    with pytest.raises(StoreError, match=r"'book' was made by 'fullkv'.*gracekv-agnostic.*ratio=1"):
        extended(ratio=4)
    for given in ({"ratio": 1}, {"entries_per_head": 9}, {"ratio": 4, "recipe": "fullkv"}):
        assert extended(**given).recipe == "fullkv"


def test_an_order_says_how_to_compress():
    follow = {"tokenizer": {"tokenizer": "0"}, "template": True}
    order = order_of(compress(recipe="knorm", expires=60.0), {"start": 3, "follow": follow})
    assert order.follow == TurnFormat(**follow)
    assert isinstance(order, Compression)
    assert (order.recipe, order.expires, order.start) == ("knorm", 60.0, 3)
    spans = order.spans(10)
    # The last token is read after the context, so that all before it have entries.
    assert (spans.context_start, spans.context_end, spans.length) == (3, 9, 10)
    assert order_of(compress(save=True)).recipe == "gracekv-agnostic"
    assert order_of({"compress": {"name": "book", "kv_bytes": "1MiB"}}).budget.kind == "kv_bytes"


@pytest.mark.parametrize(("given", "said"), [
    ({}, "A request names a context"), ({"list": 1, "delete": "x"}, "A request names a context"),
    ({"delete": "../x"}, "context's name"), ({"list": "*"}, "context's name"),
    ({"compress": "book"}, "A request names a context"), (compress(name="../x"), "context's name"),
    (compress(name=None), "context's name"), (compress(ratio=0.5), "at least 1"),
    (compress(ratio="1E+9999"), "finite number"),
    ({"compress": {"name": "book", "kv_bytes": "9" * 5000}}, "finite number"),
    # In linear time.
    ({"compress": {"name": "book", "kv_bytes": "1" + " " * 10**6 + "!"}}, "number of bytes"),
    (compress(kv_bytes=4096), "exactly one budget"),
    ({"compress": {"name": "book"}}, "exactly one budget"),
    (compress(recipe="gracekv-agnostik"), "Unknown recipe"),
    (compress(recipe=["knorm"]), "A recipe is a name"),
    (compress(recipe="gracekv"), "'gracekv', which reads more of the model than queries"),
    (compress(recipe="kvzip-two-pass"), "two-pass.*compress with transformers and export"),
    (compress(window=3), "takes .*recipe.*; got window"), (compress(save="yes"), "save"),
    (compress(expires=0), "above 0"), (compress(expires=True), "expires"),
    (compress(expires=5.0, save=True), "stays until it is deleted"),
    (compress(follow={"start": 3}), "got follow"),
])  # fmt: skip
def test_what_is_no_order_is_refused_by_name(given, said):
    with pytest.raises(StoreError, match=said):
        order_of(given)


@pytest.mark.parametrize(("start", "length"), [(0, 2), (8, 10), (20, 10), (-1, 10)])
def test_a_document_of_less_than_two_tokens_is_refused(start, length):
    with pytest.raises(StoreError, match="nothing to compress"):
        order_of(compress(), {"start": start}).spans(length)


def test_the_recipes_that_an_error_recommends_are_taken():
    with pytest.raises(StoreError) as refused:
        order_of(compress(recipe="gracekv", ratio=4))
    names = re.search(r"such as (.*), or", str(refused.value)).group(1)
    for name in [*re.split(", | or ", names), "fullkv-8bit"]:
        assert order_of(compress(recipe=name, ratio=4)).recipe == name
