"""What is finite, without a copy."""

import pytest
import torch

from gracekv.prefill.tensor_checks import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_whose_sum_overflows_are_finite_and_infinities_that_cancel_are_not(dtype):
    large = torch.full((2, 300, 4), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large)
    for bad in ([torch.nan], [torch.inf], [torch.inf, -torch.inf]):
        broken = torch.ones(2, 300, 4, dtype=dtype)
        broken[1, 7, : len(bad)] = torch.tensor(bad)
        assert not is_finite(broken)
