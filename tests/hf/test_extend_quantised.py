"""Extending contexts with quantised entries: what stays, its bytes, and decoding."""

import pytest
import torch
from hypothesis import given, settings

import gracekv
from gracekv.cache import dequantised
from gracekv.hf import GraceCache
from gracekv.pipeline import Pipeline
from gracekv.testing.models import tiny_llama
from support.draws import floats, ints, lists, some, tuples
from support.prompts import BOOK, END, book_prompt
from support.quantised_layers import CODED
from support.stored_bytes import entry_bytes


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_stay_and_budgets_are_in_bytes(name, tail, dtype):
    model = tiny_llama(layers=2, vocabulary=97, dtype=dtype)
    longer = gracekv.compress(model, book_prompt(tail=tail), ratio=3, pipeline=CODED[name])
    for number, amount in enumerate([{"ratio": 4}, {"kv_bytes": 6000}, {"compression_ratio": 0.7}]):
        before, added = longer, BOOK[100 + 70 * number : 170 + 70 * number]
        longer = before.extend(added, **amount)
        for old, new in zip(before.packed.layers, longer.packed.layers, strict=True):
            parts = list(new.coded)
            for part in old.coded:
                # Parts of the same width are in the order of the passages.
                same = next(x for x in parts if x.coding == part.coding)
                parts.remove(same)
                assert all(torch.equal(x, same.tensors()[n]) for n, x in part.tensors().items())
            for g in range(old.heads):
                for one, other in zip(old.exact.head(g), new.exact.head(g), strict=True):
                    assert torch.equal(one, other[: len(one)])
                assert bool((new.head(g)[2].diff() > 0).all())
        was, kept = before.accounting, longer.accounting
        units, dim = kept.entries.numel(), longer.packed.layers[0].dim
        budget = kept.budget_bytes - was.budget_bytes
        full = units * len(added) * 4 * dim
        assert budget == amount.get("kv_bytes", int(full / amount.get("ratio", 1 / 0.3)))
        assert budget - units * 6 * dim < kept.spent_bytes - was.spent_bytes <= budget
        assert kept.bytes == sum(map(entry_bytes, longer.packed.layers))
        assert kept.bytes - was.bytes >= kept.spent_bytes - was.spent_bytes
        assert kept.bytes == sum(share.bytes for share in kept.widths)
        beside = longer.packed.length - longer.prompt.spans.context_length
        assert torch.equal(longer.packed.entries() - beside, kept.entries)
        assert kept.full_bytes == units * longer.packed.length * 4 * dim


@settings(max_examples=12)
@given(
    name=some(sorted(CODED)),
    backend=some(["auto", "numba", "sdpa", "eager"]),
    first=ints(20, END),
    tokens=some([1, 6]),
    passages=lists(tuples(ints(1, 60), floats(1, 4)), min_size=1, max_size=3),
)
def test_decoding_reads_what_the_codes_say(model, name, backend, first, passages, tokens):
    prompt = book_prompt((4, first))
    result = gracekv.compress(model, prompt, ratio=2, pipeline=CODED[name], backend=backend)
    for length, ratio in passages:
        # A passage that is too short to compress is kept whole.
        budget = {"ratio": ratio} if length > 35 else {"kv_bytes": "1MB"}
        result = result.extend(BOOK[200 : 200 + length], **budget)
    plain = GraceCache(dequantised(result.packed), Pipeline.named("gracekv").backend)
    asked = result.prompt.ids[result.packed.length :][None]
    asked = torch.cat([asked, BOOK[None, :tokens]], dim=1)
    with torch.no_grad():
        found = [model(asked, past_key_values=x).logits for x in (result.new_cache(), plain)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
