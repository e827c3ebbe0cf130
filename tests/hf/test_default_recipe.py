"""The default recipe of `compress`: by question, and by the unit of the budget."""

import pytest
import torch

import gracekv
from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.hf.compress import per_byte
from gracekv.testing.models import tiny_llama
from support.asked_context import TEXT
from support.static_tails import steps

MODEL = {"dim": 32, "vocabulary": 2000, "dtype": torch.bfloat16}
BUDGETS = [Budget.ratio(4), Budget.kv_bytes(10**6), Budget.entries_per_head(20)]


ALLOCATED = [
    (torch.bfloat16, 32, [True, True, False]),
    (torch.float16, 64, [True, True, False]),
    (torch.float32, 32, [False, True, False]),
    # Groups of 32 channels do not fit: entries stay unquantised, and nothing is refused.
    (torch.bfloat16, 16, [False, False, False]),
]


@pytest.mark.parametrize(("dtype", "dim", "want"), ALLOCATED)
def test_bits_are_allocated_where_budgets_count_16_bit_numbers(dtype, dim, want):
    assert [per_byte(tiny_llama(dim=dim, dtype=dtype), budget) for budget in BUDGETS] == want


@pytest.mark.parametrize("question", [True, False])
def test_the_four_defaults(model, tokenizer, prompt, question):
    asked = gracekv.Prompt.from_chat(tokenizer, context=TEXT, question="Who fell?")
    given = asked if question else prompt
    name = recipes.DEFAULT if question else recipes.DEFAULT_WITHOUT_QUESTION
    by_ratio = gracekv.compress(model, given, ratio=4)
    assert recipes.label(by_ratio.pipeline) == f"{name}-allocated"
    assert by_ratio.accounting.spent_bytes <= by_ratio.accounting.budget_bytes
    assert {share.bits for share in by_ratio.accounting.widths} >= {4, 16}
    assert recipes.label(gracekv.compress(model, given, entries_per_head=20).pipeline) == name


def test_static_tails_saving_extending_and_limits_take_it(model, prompt, tmp_path):
    book = gracekv.compress(model, prompt, ratio=3)
    ids = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    want = steps(model, book.new_cache(), ids)
    static = steps(model, book.new_cache().with_static_tail(8), ids)
    torch.testing.assert_close(static, want, rtol=0, atol=0.05)

    book.save(tmp_path / "book")
    again = gracekv.load(tmp_path / "book", model)
    torch.testing.assert_close(steps(model, again.new_cache(), ids), want, rtol=0, atol=0.05)

    longer = book.extend("\n\nThe end. " * 12, ratio=3)
    assert longer.accounting.spent_bytes > book.accounting.spent_bytes
    limit = gracekv.Limit(entries_per_head=250, every=16, window=8)
    assert book.ask("Who fell?", max_new_tokens=3, limit=limit)


def test_a_short_prompt_of_a_batch_may_keep_everything(model, prompt, tokenizer):
    short = gracekv.Prompt.from_chat(tokenizer, context="Alice fell down.", instruction="Read.")
    size = 4 * 32 * 2 * 2 * short.spans.context_length
    alone = [gracekv.compress(model, x, kv_bytes=size) for x in (prompt, short)]
    both = gracekv.compress(model, [prompt, short], kv_bytes=size)
    assert alone[1].accounting.spent_bytes == size > alone[0].accounting.spent_bytes - size // 8
    assert [x.spent_bytes for x in both.accountings] == [x.accounting.spent_bytes for x in alone]
