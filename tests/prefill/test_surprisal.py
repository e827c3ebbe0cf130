"""Surprisal by blocks of the vocabulary equals the log-softmax of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.prefill.observer import FinalRun
from gracekv.segment.surprisal import unlikelihood


def case(seed, length, dim, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(dim, vocabulary, bias=False).requires_grad_(False)
    head.weight.copy_(3.0 * torch.randn(vocabulary, dim, generator=generator))
    final = torch.randn(length, dim, generator=generator)
    return final, head, torch.randint(vocabulary, (length,), generator=generator)


def surprisal(final, head, ids, vocabulary):
    """Surprisal of every position but the first."""
    return unlikelihood(FinalRun(0, final[:-1], ids[1:], head, vocabulary, None))


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 30), st.integers(2, 90))
def test_any_blocks_give_the_log_softmax(seed, length, dim, vocabulary):
    final, head, ids = case(seed, length, dim, vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gracekv.segment.surprisal._BLOCK", 1 + seed % 300)
        patch.setattr("gracekv.segment.surprisal._ROWS", 1 + seed % 17)
        found = surprisal(final, head, ids, vocabulary)
    logits = final.double() @ head.weight.double().T
    want = -logits.log_softmax(-1)[torch.arange(length - 1), ids[1:]]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-4)


class Doubled(torch.nn.Linear):
    """A head whose output is not the product with its weight."""

    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_head_that_does_more_than_multiply_is_called():
    final, head, ids = case(0, 30, 16, 50)
    doubled, hooked = Doubled(16, 50, bias=False), torch.nn.Linear(16, 50, bias=False)
    hooked.register_forward_hook(lambda module, args, output: 2.0 * output)
    for other in (doubled, hooked):
        other.requires_grad_(False).weight.copy_(head.weight / 2)
        found = surprisal(final, other, ids, 50)
        torch.testing.assert_close(found, surprisal(final, head, ids, 50))
