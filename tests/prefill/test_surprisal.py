"""Surprisal by blocks of the vocabulary equals the log-softmax of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.kernels import logsumexp as logsumexp_module
from gracekv.kernels.logsumexp import logsumexp
from gracekv.prefill.observer import FinalRun
from gracekv.segment.surprisal import unlikelihood


def case(seed, length, dim, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(dim, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
    head.weight.copy_(3.0 * torch.randn(vocabulary, dim, generator=generator))
    final = torch.randn(length, dim, generator=generator).to(dtype)
    return final, head, torch.randint(vocabulary, (length,), generator=generator)


def surprisal(final, head, ids, vocabulary, softcap=None):
    """Of every position; position 0 gets 0."""
    following = unlikelihood(FinalRun(0, final[:-1], ids[1:], head, vocabulary, softcap))
    return torch.nn.functional.pad(following, (1, 0))


def expected(final, head, ids):
    logits = final.double() @ head.weight.double().T
    return -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 30), st.integers(2, 90))
def test_any_blocks_give_the_log_softmax(seed, length, dim, vocabulary):
    final, head, ids = case(seed, length, dim, vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gracekv.segment.surprisal._BLOCK", 1 + seed % 300)
        patch.setattr("gracekv.segment.surprisal._ROWS", 1 + seed % 17)
        found = surprisal(final, head, ids, vocabulary)
    assert found[0] == 0
    torch.testing.assert_close(found[1:].double(), expected(final, head, ids), rtol=1e-5, atol=1e-4)


class Doubled(torch.nn.Linear):
    """A head whose output is not its weight's product."""

    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_head_that_does_more_than_multiply_is_called():
    final, head, ids = case(0, 30, 16, 50)
    doubled = Doubled(16, 50, bias=False).requires_grad_(False)
    doubled.weight.copy_(head.weight / 2)
    torch.testing.assert_close(surprisal(final, doubled, ids, 50), surprisal(final, head, ids, 50))
    hooked = torch.nn.Linear(16, 50, bias=False).requires_grad_(False)
    hooked.weight.copy_(head.weight / 2)
    hooked.register_forward_hook(lambda module, args, output: 2.0 * output)
    torch.testing.assert_close(surprisal(final, hooked, ids, 50), surprisal(final, head, ids, 50))


def test_never_negative_in_half_precision():
    final, head, ids = case(1, 200, 64, 3, torch.bfloat16)
    assert bool((surprisal(final, head, ids, 3) >= 0).all())


def both_kinds(parts):
    """By torch and by numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        by_torch = logsumexp(part.clone() for part in parts)
    return by_torch, logsumexp(part.clone() for part in parts)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    blocks=st.lists(st.integers(1, 2300), min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_one_reading_sums_what_sweeps_sum(seed, rows, blocks, scale):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(seed)
    parts = [scale * torch.randn(rows, size, generator=generator) for size in blocks]
    # Rows that begin, or end, far below the others.
    parts[seed % len(parts)][0] -= 200.0
    want = torch.cat(parts, dim=1).double().logsumexp(dim=1)
    for found in both_kinds(parts):
        torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    pytest.importorskip("numba")
    block = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    block[1, 2500] = bad
    found = both_kinds([block[:, :1000], block[:, 1000:], block[:, :10]])
    assert found[0].isnan().tolist() == found[1].isnan().tolist() == [False, True, False]


def test_without_numba_torch_sums(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(logsumexp_module, "_add_compiled", None)
    final, head, ids = case(2, 30, 16, 50)
    torch.testing.assert_close(
        surprisal(final, head, ids, 50)[1:].double(),
        expected(final, head, ids),
        rtol=1e-5,
        atol=1e-4,
    )
