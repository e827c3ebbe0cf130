"""Checks for finite values, without a copy."""

import pytest
import torch

from gracekv.errors import NonFiniteError
from gracekv.prefill.layer_capture import FiniteChecks
from support.devices import two_devices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_whose_sum_overflows_are_finite_and_infinities_that_cancel_are_not(dtype):
    FiniteChecks().add(torch.full((2, 300, 4), torch.finfo(dtype).max, dtype=dtype), "large")
    for bad in ([torch.nan], [torch.inf], [torch.inf, -torch.inf]):
        broken = torch.ones(2, 300, 4, dtype=dtype)
        broken[1, 7, : len(bad)] = torch.tensor(bad)
        with pytest.raises(NonFiniteError, match="broken"):
            FiniteChecks().add(broken, "broken")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_another_device_is_looked_at_once_at_the_end(dtype, bad):
    sound, broken = torch.ones(2, 5), torch.ones(2, 5)
    broken[1, 3] = bad
    with two_devices() as there:
        checks = FiniteChecks()
        checks.add(sound, "sound and near")
        with pytest.raises(NonFiniteError, match="broken and near"):
            checks.add(broken, "broken and near")
        for name, tensor in {"sound": sound, "broken": broken, "second": broken}.items():
            checks.add(tensor.to(there, dtype), f"{name} and far")
        with pytest.raises(NonFiniteError, match="broken and far"):
            checks.finish()
        checks = FiniteChecks()
        checks.add(sound.to(there), "sound and far")
        checks.finish()
