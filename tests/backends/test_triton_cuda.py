"""The compiled kernels on a GPU: run `pytest tests/backends/test_triton_cuda.py`."""

import dataclasses
import itertools
import math

import pytest
import torch

from gracekv.backends import AttentionSpec, AttentionStep, Auto, Sdpa, Triton
from gracekv.backends.reference import attention
from gracekv.testing.attention import TOLERANCES, attention_problem, check_attention, relative_error
from support.quantised_layers import quantised

GPU = torch.device("cuda")
BACKEND = Triton()
OBSTACLE = BACKEND.obstacle(AttentionSpec(GPU))

pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=f"no GPU here: {OBSTACLE}")

# float32 products on tensor cores are three tf32 ones; their error is near 1e-6.
BOUNDS = {**TOLERANCES, torch.float32: 1e-5}


def ask(problem, backend=BACKEND, prepared=None):
    prepared = backend.prepare(problem.packed) if prepared is None else prepared
    return backend(dataclasses.replace(problem, packed=prepared))


def check(seed, lengths, **options):
    problem = attention_problem(seed, lengths, device="cuda", **options)
    check_attention(BACKEND, problem, bound=BOUNDS[problem.query.dtype])


# Every combination compiles its own kernel, which takes longer than the test: so all pairs of head
# dimension and dtype, and all pairs of query rows and mask, instead of all 270 combinations.
ROWS = list(itertools.product([(1, 1), (4, 1), (7, 3), (8, 4), (4, 40)], ["none", "bool", "float"]))
HEADS = itertools.product([20, 64, 80, 96, 128, 256], TOLERANCES)
KERNELS = [(128, torch.bfloat16, *rows) for rows in ROWS]
KERNELS += [(*head, *rows) for head, rows in zip(HEADS, itertools.cycle(ROWS), strict=False)]


@pytest.mark.parametrize(("dim", "dtype", "rows", "mask"), KERNELS, ids=str)
def test_equals_dense_attention(dim, dtype, rows, mask):
    group, tokens = rows
    check(
        dim, [3000, 60, 0, 700], dim=dim, group=group, batch=2, tokens=tokens, tail=300 + tokens,
        mask=mask, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_capped_logits_and_sink_logits(dtype, softcap, sinks):
    check(
        6, [3000, 60, 0, 700], dim=128, group=4, batch=2, tokens=2, tail=300, dtype=dtype,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_codes_equal_dense_attention(dtype, bits, dim):
    rng = torch.Generator().manual_seed(dim)
    layer = quantised(rng, [900, 9, 0, 600], dim, dtype, 2, device="cuda", stop=800, bits=bits)
    query = torch.randn(2, 8, 1, dim, generator=rng).to("cuda", dtype)
    tail = [torch.randn(2, 2, 5, dim, generator=rng).to("cuda", dtype) for _ in "kv"]
    asked = (*tail, dim**-0.5)
    output = BACKEND(AttentionStep(query, BACKEND.prepare(layer), *asked))
    want, _ = attention(AttentionStep(query, layer, *asked))
    assert relative_error(output.cpu(), want) <= BOUNDS[dtype]


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_of_sequences(shuffled):
    check(
        1, [900, 30, 0, 400, 2000, 5], dim=128, group=4, batch=9, tail=70, dtype=torch.bfloat16,
        sequences=3, shuffled=shuffled,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_repeats_to_the_bit(dtype):
    problem = attention_problem(
        2, [20_000, 400, 400, 400], dim=128, group=4, batch=2, tail=500, dtype=dtype, device="cuda"
    )
    prepared = BACKEND.prepare(problem.packed)
    first = ask(problem, prepared=prepared)
    for _ in range(50):
        assert torch.equal(ask(problem, prepared=prepared), first)


def test_auto_takes_it_and_agrees_with_sdpa():
    problem = attention_problem(3, [500, 20], group=4, tail=9, device="cuda")
    assert Auto().resolve(AttentionSpec(GPU, torch.float32, 64)) == BACKEND
    torch.testing.assert_close(ask(problem), ask(problem, Sdpa()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_recorded_once_decodes_a_growing_tail(dtype):
    capacity, start, steps = 400, 3, 150
    problem = attention_problem(
        4, [2000, 50], dim=128, group=4, batch=2, tail=capacity, dtype=dtype, device="cuda"
    )
    prepared = BACKEND.prepare(problem.packed)
    keys, values = (torch.full_like(x, math.nan) for x in (problem.keys, problem.values))
    query = problem.query.clone()
    length = torch.full((2,), start, device="cuda")
    keys[:, :, :start] = problem.keys[:, :, :start]
    values[:, :, :start] = problem.values[:, :, :start]

    def step():
        return BACKEND(AttentionStep(query, prepared, keys, values, problem.scale, length=length))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    for end in range(start + 1, start + steps):
        keys[:, :, end - 1] = problem.keys[:, :, end - 1]
        values[:, :, end - 1] = problem.values[:, :, end - 1]
        query.normal_()
        length.fill_(end)
        graph.replay()
        want = BACKEND(
            AttentionStep(query, prepared, keys[:, :, :end], values[:, :, :end], problem.scale)
        )
        assert relative_error(output, want) <= BOUNDS[dtype]


def test_compiles_whole_while_the_tail_grows():
    problem = attention_problem(5, [700, 8], group=2, tail=40, device="cuda")
    prepared = BACKEND.prepare(problem.packed)

    def step(query, keys, values):
        return BACKEND(AttentionStep(query * 2, prepared, keys, values, 0.125)).transpose(1, 2) + 1

    compiled = torch.compile(step, fullgraph=True)
    for length in range(3, 20):
        tail = problem.keys[:, :, :length], problem.values[:, :, :length]
        torch.testing.assert_close(compiled(problem.query, *tail), step(problem.query, *tail))


def test_generation_replays_a_graph_and_grows():
    pytest.importorskip("transformers")
    import gracekv
    from gracekv.hf import graph_replay
    from gracekv.testing.models import tiny_llama

    model = tiny_llama(layers=2, dim=64).to(GPU)
    rng = torch.Generator().manual_seed(6)
    prompts = [
        gracekv.Prompt.from_ids(torch.randint(0, 97, (length,), generator=rng), (2, length - 9))
        for length in (200, 150)
    ]
    result = gracekv.compress(model, prompts, ratio=4)
    assert graph_replay.suits(model, result.new_cache(), 200, {})
    with graph_replay.replaying(model, result.new_cache(), 200):
        assert model.forward.records
    answer = result.generate_ids(200, eos_token_id=None)

    # The replayed answer's tokens are those of the growing tail, up to tied logits.
    cache, ids = result.new_cache(), result.inputs["input_ids"][:, -1:]
    with torch.no_grad():
        for token in answer.T:
            logits = model(ids, past_key_values=cache).logits[:, -1].float()
            assert bool((logits.gather(1, token[:, None])[:, 0] >= logits.amax(-1) - 1e-2).all())
            ids = token[:, None]
