"""Columns of softmax rows on GPUs, interpreted, against float64."""

import torch
from hypothesis import given, settings

from gracekv.kernels.softmax_sums import softmax_columns
from support.covering import LONG
from support.draws import SEEDS, bools, ints, some


@settings(max_examples=15 if LONG else 5)
@given(
    seed=SEEDS, groups=ints(1, 2), group=ints(1, 3), count=ints(1, 300), length=ints(1, 150),
    dim=some([8, 20, 64, 80]), power=some([1.0, 1.5, 2.0]), maximum=bools(),
    dtype=some([torch.float32, torch.bfloat16, torch.float16]), scale=some([1.0, 0.3]),
    has_sinks=bools(), half_queries=bools(), strided=bools(), least=some([1, 150]),
)  # fmt: skip
def test_equals_the_torch_engine(
    seed, groups, group, count, length, dim, power, maximum, dtype, scale, has_sinks, half_queries,
    strided, least,
):  # fmt: skip
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(groups * group, count, dim, generator=made)
    keys = torch.randn(groups, length, dim, generator=made).to(dtype)
    if half_queries:  # as a model computes them; others are rotated in float32
        queries = queries.to(dtype)
    if strided:  # parts of larger tensors
        queries = torch.cat([queries, queries], dim=1)[:, :count]
        keys = torch.cat([keys, keys], dim=2)[..., :dim]
    seen = torch.randint(min(least, length), length + 1, (count,), generator=made)
    inputs = (queries, keys, seen, torch.rand(count, generator=made))
    sinks = 5 * torch.randn(len(queries), count, generator=made) if has_sinks else None
    rules = {"scale": scale, "power": power, "maximum": maximum, "sinks": sinks}
    got, want = (softmax_columns(*inputs, **rules, engine=engine) for engine in ("triton", "torch"))
    # Two bfloat16 parts of a query miss 2^-17 of it, in logits of up to about thirty.
    tolerance = 2e-3 if dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-6)
