"""Every backend against attention in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.backends import AttentionStep, Eager, Numba, Sdpa
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.testing.attention import TOLERANCES, attention_problem, check_attention
from support.draws import SEEDS, bools, ints, lists, some

VARIANTS = [Eager(), Sdpa(), Sdpa(kernel="plain"), Numba()]


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
@given(
    seed=SEEDS, lengths=lists(ints(0, 70), min_size=1, max_size=3), group=ints(1, 4),
    batch=ints(1, 3), tokens=ints(1, 5), before=ints(0, 9), mask=some(["none", "bool", "float"]),
    dim=some([8, 20, 64]), dtype=some(list(TOLERANCES)), softcap=some([None, 1.5]), sinks=bools(),
)  # fmt: skip
def test_packed_and_tail_together_equal_dense_attention(backend, seed, lengths, before, **options):
    problem = attention_problem(seed, lengths, tail=before + options["tokens"], **options)
    # Three roundings to the dtype: the output of each part, and their combination.
    check_attention(backend, problem, bound=2 * TOLERANCES[options["dtype"]])


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
@given(
    seed=SEEDS, lengths=lists(ints(0, 40), min_size=6, max_size=6) | st.just([9] * 6),
    sequences=some([1, 2, 3, 6]), repeats=ints(1, 3), shuffled=bools(),
)  # fmt: skip
def test_each_row_reads_its_own_sequence(backend, seed, lengths, sequences, repeats, shuffled):
    """Six rows of entries as 1x6, 2x3, 3x2 or 6x1 sequences and heads, alone and together."""
    problem = attention_problem(
        seed, lengths, dim=8, group=2, batch=sequences * repeats, tokens=2, tail=3,
        sequences=sequences, shuffled=shuffled,
    )  # fmt: skip
    output = backend(replace(problem, packed=backend.prepare(problem.packed)))
    for row in range(sequences * repeats):
        number = row // repeats if problem.rows is None else int(problem.rows[row])
        parts = (x[row : row + 1] for x in (problem.query, problem.keys, problem.values))
        query, keys, values = parts
        own = problem.packed.sequence(number)
        alone = Eager()(AttentionStep(query, own, keys, values, problem.scale))
        torch.testing.assert_close(output[row : row + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_a_batch_that_does_not_fit_the_sequences_is_refused(backend):
    prepared = backend.prepare(attention_problem(0, [4, 6], dim=8, sequences=2).packed)
    query = torch.randn(3, 1, 1, 8)
    with pytest.raises(ShapeError, match="2 sequences takes a multiple"):
        backend(AttentionStep(query, prepared, query, query, 1.0))
    with pytest.raises(ShapeError, match=r"got a batch of 3 and rows \[2\]"):
        backend(AttentionStep(query, prepared, query, query, 1.0, rows=torch.tensor([0, 1])))


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_long_uneven_heads_and_a_padded_start(backend):
    # A whole block of the fused kernel is hidden before the first visible key.
    mask = torch.ones(2, 1, 1, 1500, dtype=torch.bool)
    mask[1, :, :, :1100] = False
    problem = attention_problem(0, [3000, 17, 900], group=2, batch=2, tail=1500)
    check_attention(backend, replace(problem, mask=mask))


def test_the_fused_kernel_is_refused_off_the_cpu():
    layer = attention_problem(3, [4], dim=8).packed
    moved = replace(layer, keys=layer.keys.to("meta"), values=layer.values.to("meta"))
    with pytest.raises(BackendUnavailableError, match="kernel='auto' or 'plain'"):
        Sdpa(kernel="fused").prepare(moved)
