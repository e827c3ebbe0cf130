"""The sdpa backend: a head split into windows for several threads, and long turns in blocks."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.backends import AttentionStep, Eager, Sdpa, sdpa
from gracekv.backends.reference import attention
from gracekv.testing.attention import TOLERANCES, attention_problem, check_attention, relative_error
from support.covering import cases
from support.draws import SEEDS, bools, ints, lists, some
from support.quantised_layers import layer_of


def prepared(problem):
    return dataclasses.replace(problem, packed=Sdpa().prepare(problem.packed))


@pytest.fixture(params=[1, 4])
def threads(request, monkeypatch):
    monkeypatch.setattr(sdpa.torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(sdpa, "_SHORTEST", 2)
    return request.param


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("backend", [Sdpa(), Sdpa(kernel="plain")], ids=repr)
@settings(max_examples=cases(6, 30))
@given(
    seed=SEEDS, lengths=lists(ints(0, 3) | ints(0, 400), min_size=1, max_size=4),
    group=some([1, 3, 8]), sequences=ints(1, 3), copies=ints(1, 2), tokens=some([1, 1, 2, 40]),
    before=ints(0, 9), mask=some(["none", "bool", "float"]), shuffled=bools(),
    dim=some([8, 80, 128]), dtype=some(list(TOLERANCES)),
)  # fmt: skip
def test_windows_give_attention_in_float64(
    backend, seed, lengths, group, sequences, copies, tokens, before, mask, shuffled, dim, dtype
):
    problem = attention_problem(
        seed, lengths * sequences, dim=dim, group=group, batch=sequences * copies, tokens=tokens,
        tail=before + tokens, mask=mask, dtype=dtype, sequences=sequences, shuffled=shuffled,
    )  # fmt: skip
    # Three roundings to the dtype: the output of each part, and their combination.
    check_attention(backend, problem, bound=2 * TOLERANCES[dtype])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("lengths", [[4000, 80, 80], [700] * 8, [3, 0, 2]])
@pytest.mark.parametrize("group", [4, 71])
def test_unbalanced_and_even_heads(lengths, group):
    problem = attention_problem(1, lengths, group=group, tail=5)
    assert relative_error(Sdpa()(prepared(problem)), Eager()(problem)) <= TOLERANCES[torch.float32]


def test_each_thread_reads_a_window_and_every_entry_is_in_one(monkeypatch):
    monkeypatch.setattr(sdpa.torch, "get_num_threads", lambda: 4)
    calls = []

    def attend(rows, keys, values, bias, scale):
        calls.append((rows.shape, keys.shape, int((bias > -torch.inf).sum())))
        return sdpa.plain(rows, keys, values, bias, scale)

    problem = attention_problem(2, [1001], group=3)
    monkeypatch.setattr(sdpa, "fused", attend)
    Sdpa().packed(prepared(problem))
    assert calls == [((1, 4, 3, 64), (1, 4, 251, 64), 1001)]


@pytest.mark.parametrize("mask", ["none", "bool", "length"])
def test_a_long_turn_is_attended_in_blocks(monkeypatch, mask):
    kind = "none" if mask == "length" else mask
    step = attention_problem(3, [7, 9], dim=16, group=2, batch=2, tokens=23, tail=40, mask=kind)
    if mask == "length":
        buffers = {name: getattr(step, name).nan_to_num() for name in ("keys", "values")}
        step = dataclasses.replace(step, **buffers, length=torch.tensor([40, 31]))
    split = dataclasses.replace(step, packed=Sdpa("plain").prepare(step.packed))
    whole, packed = Sdpa().tail(step), Sdpa("plain")(split)

    monkeypatch.setattr(sdpa, "_TAIL_LOGITS", 2 * 40 * 5)
    monkeypatch.setattr(sdpa, "_PACKED_LOGITS", 7 * 40)
    blocks = Sdpa().tail(step)

    torch.testing.assert_close(Sdpa("plain")(split), packed)
    torch.testing.assert_close(blocks.output, whole.output)
    torch.testing.assert_close(blocks.lse, whole.lse)
    torch.testing.assert_close(whole.lse.double(), attention(step)[1][1], rtol=0, atol=1e-4)


def test_a_step_can_be_differentiated():
    problem = attention_problem(4, [50, 40], group=2)
    query = torch.randn(1, 4, 1, 64, requires_grad=True)
    tail = torch.randn(1, 2, 3, 64)

    Sdpa()(AttentionStep(query, prepared(problem).packed, tail, tail, 0.125)).sum().backward()

    assert bool(query.grad.isfinite().all())


def test_reordered_rows_of_64_bits():
    rng, rows = torch.Generator().manual_seed(1), torch.tensor([1, 0, 1, 0])
    layer = layer_of(rng, [9, 4, 7, 5], 16, torch.float64, 2)
    query, tail = (torch.randn(4, 2, n, 16, generator=rng).double() for n in (1, 3))
    asked = (tail, tail, 0.25, None, None, rows)
    want, _ = attention(AttentionStep(query, layer, *asked))
    output = Sdpa()(AttentionStep(query, Sdpa().prepare(layer), *asked))
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
