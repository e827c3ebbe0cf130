"""Tracing, and decoding over a buffer whose used length is on the device."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

from gracekv.backends import AttentionStep, Triton, triton_attention
from gracekv.backends.reference import attention
from gracekv.errors import ShapeError
from gracekv.testing.attention import TOLERANCES, attention_problem, relative_error

BACKEND = Triton()


def buffers(problem, capacity):
    """The problem's tail in buffers of `capacity` places, with NaN at the unused end."""
    for x in (problem.keys, problem.values):
        buffer = x.new_full((*x.shape[:2], capacity, x.shape[3]), torch.nan)
        buffer[:, :, : x.shape[2]] = x
        yield buffer


@pytest.fixture
def launches(monkeypatch):
    """Grid and arguments of every launch; tensors by shape and stride."""
    seen = []

    def plain(a):
        return (tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                named = {name: plain(a) for name, a in kwargs.items()}
                seen.append((grid, [plain(a) for a in args], named))
                self.kernel[grid](*args, **kwargs)

            return launch

    for name in ("attend_splits", "merge_splits"):
        kernel = Recorder(getattr(triton_attention, name))
        monkeypatch.setattr(triton_attention, name, kernel)
    return seen


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_recorded_launch_serves_a_growing_tail(launches, tokens):
    recorded = []
    for tail in (tokens, 5, 129, 300):
        problem = attention_problem(1, [90, 12], group=2, batch=2, tokens=tokens, tail=tail)
        keys, values = buffers(problem, 300)
        length = torch.full((2,), tail)
        launches.clear()

        prepared = BACKEND.prepare(problem.packed)
        output = BACKEND(replace(problem, packed=prepared, keys=keys, values=values, length=length))

        want, _ = attention(problem)
        assert relative_error(output, want) <= TOLERANCES[torch.float32]
        recorded.append(list(launches))
    assert len(recorded[0]) == 2
    assert all(launch == recorded[0] for launch in recorded)


def test_rows_may_have_tails_of_different_length():
    problem = attention_problem(2, [30], batch=3, tail=20)
    prepared = BACKEND.prepare(problem.packed)
    lengths = [20, 1, 7]
    keys, values = buffers(problem, 64)
    for row, length in enumerate(lengths):
        keys[row, :, length:] = torch.nan
        values[row, :, length:] = torch.nan

    length = torch.tensor(lengths, dtype=torch.int32)
    output = BACKEND(AttentionStep(problem.query, prepared, keys, values, 0.125, length=length))

    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        tail = (x[one, :, :length] for x in (problem.keys, problem.values))
        alone = BACKEND(AttentionStep(problem.query[one], prepared, *tail, 0.125))
        torch.testing.assert_close(output[one], alone)


def test_a_length_that_does_not_fit_the_batch_is_refused():
    problem = attention_problem(3, [9], batch=2, tail=4)
    prepared = BACKEND.prepare(problem.packed)
    with pytest.raises(ShapeError, match=r"takes `length` \[B\]"):
        BACKEND(replace(problem, packed=prepared, length=torch.tensor([4])))


@pytest.mark.parametrize("tail_length", [4, 0])
def test_operator_keeps_torch_contract(tail_length):
    problem = attention_problem(4, [20, 3], group=2, batch=2, tokens=2, tail=tail_length)
    table = BACKEND.prepare(problem.packed).tables.tables[0]
    layer = problem.packed
    part, rows = table.parts[0], torch.zeros(2, dtype=torch.int64)
    packed = layer.keys, layer.values, layer.log_multiplicity, part.items, part.item_first
    length = torch.tensor([4, 2]) if tail_length else None
    step = problem.keys, problem.values, length, None, 0.125, table.slots, part.most, 8, [], []

    torch.library.opcheck(
        torch.ops.gracekv.ragged_attention.default,
        (problem.query, *packed, table.row_first, rows, *step),
    )


def test_compiles_whole_and_not_again_while_the_tail_grows():
    recorder = EagerAndRecordGraphs()
    problem = attention_problem(5, [40, 8], group=2, tail=30)
    prepared = BACKEND.prepare(problem.packed)

    def step(query, keys, values):
        return BACKEND(AttentionStep(query * 2, prepared, keys, values, 0.125)).transpose(1, 2) + 1

    compiled = torch.compile(step, fullgraph=True, backend=recorder)
    for length in range(3, 12):
        tail = problem.keys[:, :, :length], problem.values[:, :, :length]
        torch.testing.assert_close(compiled(problem.query, *tail), step(problem.query, *tail))
    # The second length shows that it varies; from then on it is a symbol.
    assert len(recorder.graphs) <= 2
    assert any("ragged_attention" in str(node.target) for node in recorder.graphs[-1].graph.nodes)
