"""The comparisons of choices: near ties pass, everything else fails."""

import pytest
import torch

from support.margins import (
    assert_same_choice,
    assert_same_order,
    assert_same_steps,
    assert_same_tokens,
    indicator,
)

SCORES = torch.tensor([[0.5, 0.3, 0.3000001, 0.1]])


def test_orders_may_differ_at_a_tie_only():
    want = torch.tensor([[0, 2, 1, 3]])
    assert_same_order(want, want, SCORES)
    assert_same_order(torch.tensor([[0, 1, 2, 3]]), want, SCORES)
    with pytest.raises(AssertionError, match="no tie"):
        assert_same_order(torch.tensor([[1, 0, 2, 3]]), want, SCORES)
    with pytest.raises(AssertionError, match="twice"):
        assert_same_order(torch.tensor([[0, 1, 1, 3]]), want, SCORES)


def test_choices_may_exchange_a_tie_only():
    want = indicator([{0, 2}], 4)
    assert_same_choice(indicator([{0, 1}], 4), want, SCORES)
    with pytest.raises(AssertionError, match="no tie"):
        assert_same_choice(indicator([{0, 3}], 4), want, SCORES)
    with pytest.raises(AssertionError, match="not as many"):
        assert_same_choice(indicator([{0}], 4), want, SCORES)
    # Two swapped pairs tie on average, but not individually.
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    with pytest.raises(AssertionError, match="no tie"):
        assert_same_choice(indicator([{0, 1}], 4), indicator([{2, 3}], 4), scores)


def test_answers_may_part_at_a_tie_only():
    logits = torch.tensor([[1.0, 5.0, 4.9999], [7.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    want = torch.tensor([1, 0, 1])

    def after(tokens):
        return logits[len(tokens)]

    assert_same_tokens(want, want, after)
    assert_same_tokens(torch.tensor([2, 2, 2]), want, after)  # a tie, then another text
    with pytest.raises(AssertionError, match="new token 1 is 1 in place of 0"):
        assert_same_tokens(torch.tensor([1, 1, 1]), want, after)
    with pytest.raises(AssertionError, match="not the likeliest"):
        assert_same_tokens(torch.tensor([1, 2]), torch.tensor([1, 1]), after)
    with pytest.raises(AssertionError, match="one is longer"):
        assert_same_tokens(want[:2], want, after)


def test_logits_are_compared_up_to_where_answers_part():
    logits = torch.tensor([[1.0, 5.0, 4.9999], [7.0, 1.0, 1.0]])
    want, other = torch.tensor([1, 0]), torch.tensor([2, 1])
    assert_same_steps(want, logits, want, logits)
    assert_same_steps(other, logits + torch.tensor([[0.0], [3.0]]), want, logits)
    with pytest.raises(AssertionError):
        assert_same_steps(want, logits + torch.tensor([[0.0], [3.0]]), want, logits)
