"""The kernels, interpreted, against attention in float64."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings

from gracekv.backends import AttentionSpec, Auto, Triton
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.testing.attention import TOLERANCES, attention_problem, check_attention
from support.covering import LONG, covering
from support.draws import SEEDS, bools, ints, lists, some

BACKEND = Triton()


def ask(problem):
    return BACKEND(replace(problem, packed=BACKEND.prepare(problem.packed)))


@settings(max_examples=15 if LONG else 6)
@given(
    seed=SEEDS, lengths=lists(ints(0, 90), min_size=2, max_size=2), copies=ints(1, 2),
    before=ints(0, 9), tokens=ints(1, 3), sequences=ints(1, 2), group=ints(1, 5), shuffled=bools(),
    mask=some(["none", "bool", "float"]), dim=some([8, 20, 64]), dtype=some(list(TOLERANCES)),
    softcap=some([None, 1.5]), sinks=bools(),
)  # fmt: skip
def test_equals_dense_attention(seed, lengths, copies, before, tokens, sequences, **shape):
    shape |= {"batch": sequences * copies, "sequences": sequences}
    shape |= {"tokens": tokens, "tail": before + tokens}
    check_attention(BACKEND, attention_problem(seed, lengths, **shape))


SHAPES = [(64, 1, 1), (80, 4, 2), (96, 7, 3), (128, 8, 1), (256, 2, 1)]


@pytest.mark.parametrize(("shape", "dtype"), covering(list(product(SHAPES, TOLERANCES))), ids=str)
def test_every_dimension_and_dtype(shape, dtype):
    dim, group, tokens = shape
    problem = attention_problem(
        dim, [150, 3], dim=dim, group=group, tokens=tokens, tail=40 + tokens, dtype=dtype
    )
    check_attention(BACKEND, problem)


@pytest.mark.parametrize(("splits", "parts"), [(2, 8), (1, 7)])
def test_one_head_fifty_times_longer_than_the_rest(splits, parts):
    problem = attention_problem(3, [1500, 30, 0, 30], group=4, tail=1)
    backend = Triton(splits, processors=8)
    check_attention(backend, problem)

    table = backend.prepare(problem.packed).tables.tables[0]
    assert table.row_first[0].diff().tolist() == [parts, 1, 0, 1]


def test_an_empty_tail_changes_nothing():
    problem = attention_problem(5, [40, 10], group=2, tail=4, mask="bool")
    problem.mask.fill_(False)
    empty = {name: getattr(problem, name)[:, :, :0] for name in ("keys", "values")}

    assert torch.equal(ask(problem), ask(replace(problem, **empty, mask=None)))


def test_a_turn_of_many_tokens_takes_several_query_tiles():
    problem = attention_problem(6, [70], dim=16, group=4, tokens=37, tail=45)
    check_attention(BACKEND, problem)
    tables = BACKEND.prepare(problem.packed).tables
    assert tables.for_readers(3) is not tables.for_readers(64)


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_every_table_reads_all_entries(batch):
    check_attention(BACKEND, attention_problem(7, [260], dim=16, batch=batch))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_repeats_to_the_bit(dtype):
    problem = attention_problem(
        8, [200, 9, 0, 80], group=3, batch=2, tokens=2, tail=30, dtype=dtype, sequences=2
    )
    first = ask(problem)
    assert torch.equal(ask(problem), first)
    # A batch row's result must not depend on the other rows.
    rows = torch.tensor([1, 0])
    flipped = {name: getattr(problem, name).flip(0) for name in ("query", "keys", "values")}
    assert torch.equal(ask(replace(problem, **flipped, rows=rows)).flip(0), first)


def test_masks_of_other_strides_and_of_huge_negative_numbers():
    problem = attention_problem(9, [20, 20], batch=2, tokens=3, tail=12, mask="float")
    one = problem.mask[:1, :, :1]
    shared = one.expand(1, 1, 3, 12)
    many = one.expand(2, 1, 3, 12).contiguous()
    prepared = BACKEND.prepare(problem.packed)

    def run(mask):
        return BACKEND(replace(problem, packed=prepared, mask=mask))

    assert torch.equal(run(shared), run(many))
    hidden = torch.zeros(2, 1, 3, 12, dtype=torch.bool)
    hidden[..., :7] = True
    # Its last row is 2^31 elements behind the first; the memory in between is never touched.
    far = torch.empty(2**31 + 12, dtype=torch.bool).as_strided((1, 1, 3, 12), (1, 1, 2**30, 1))
    assert torch.equal(run(far.copy_(hidden[:1]).expand(2, -1, -1, -1)), run(hidden))
    lowest = torch.zeros(2, 1, 3, 12).masked_fill(~hidden, torch.finfo(torch.float32).min)
    assert torch.equal(run(hidden), run(lowest))


def test_auto_on_the_cpu_does_not_take_the_interpreter():
    assert Auto().resolve(AttentionSpec(torch.device("cpu"))).name != "triton"


def test_what_the_kernels_cannot_read_is_refused():
    double = attention_problem(12, [4], dtype=torch.float64)
    wide = attention_problem(12, [4], dim=288)
    with pytest.raises(BackendUnavailableError, match=r"float64. Use backend 'sdpa'"):
        BACKEND.prepare(double.packed)
    with pytest.raises(BackendUnavailableError, match=r"got 288. Use backend 'sdpa'"):
        BACKEND.prepare(wide.packed)


def call(**changes):
    p = attention_problem(13, [9, 4, 3, 6], group=2, batch=2, tail=3, sequences=2)
    return ask(replace(p, **{name: change(p) for name, change in changes.items()}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"query": lambda p: p.query[..., :32]}, "of dimension 32"),
    ({"query": lambda p: p.query.half()}, r"queries in torch\.float16"),
    ({"query": lambda p: p.query[:, :3]}, "equal groups for 2 KV heads; got 3"),
    ({"query": lambda p: p.query[:1]}, "a batch of 1 and rows None"),
    ({"keys": lambda p: p.keys[:1]}, r"tail is keys and values \[2, G, S, 64\]"),
    ({"rows": lambda p: torch.zeros(3, dtype=torch.int64)}, r"rows \[3\]"),
    ({"values": lambda p: p.values[:, :, :2]}, r"\[2, G, S, 64\]"),
    ({"mask": lambda p: torch.ones(2, 1, 1, 2, dtype=torch.bool)}, r"mask is \[2, 1, 1, 3\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_kernel_reads_it(changes, message):
    call()
    with pytest.raises(ShapeError, match=message):
        call(**changes)
