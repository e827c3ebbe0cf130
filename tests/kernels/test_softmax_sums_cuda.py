"""Columns of softmax rows on a real GPU, against torch in float64."""

import pytest
import torch

from gracekv.kernels.device import obstacle
from gracekv.kernels.softmax_sums import softmax_columns

REASON = obstacle(torch.device("cuda"), "torch")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no GPU here: {REASON}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("power", "maximum"), [(1.0, False), (2.0, False), (1.0, True)])
def test_equals_the_definition(dtype, dim, power, maximum):
    made = torch.Generator("cuda").manual_seed(dim)
    queries = torch.randn(8, 700, dim, generator=made, device="cuda") / dim**0.25
    keys = torch.randn(2, 1500, dim, generator=made, device="cuda").to(dtype) / dim**0.25
    seen = torch.randint(1500 if power == 2 else 1, 1501, (700,), generator=made, device="cuda")
    weights = torch.rand(700, generator=made, device="cuda")
    got = softmax_columns(queries, keys, seen, weights, power=power, maximum=maximum)
    logits = queries.double() @ keys.double().repeat_interleave(4, dim=0).mT
    logits.masked_fill_(torch.arange(1500, device="cuda") >= seen[:, None], -torch.inf)
    shares = weights.double()[:, None] * logits.softmax(-1) ** power
    want = shares.amax(1) if maximum else shares.sum(1)
    tolerance = 2e-3 if dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-7)
    again = softmax_columns(queries, keys, seen, weights, power=power, maximum=maximum)
    assert torch.equal(got, again)
