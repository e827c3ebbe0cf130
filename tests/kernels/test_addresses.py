"""Tensors that do not fit a compiled kernel are named before it reads them."""

import pytest
import torch

from gracekv.errors import ShapeError
from gracekv.kernels.compiled import address
from support.devices import two_devices


def test_a_tensor_that_fits_gives_its_address():
    tensor = torch.zeros(2, 3)
    assert address("keys", tensor, torch.float32, 2, 3) == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2, 2),
        torch.zeros(6),
        torch.zeros(3, 2).T,
    ],
)
def test_others_are_refused_by_name(tensor):
    with pytest.raises(ShapeError, match=r"takes 'keys' as a contiguous tensor \[2, 3\] of torch"):
        address("keys", tensor, torch.float32, 2, 3)


def test_so_is_one_on_another_device():
    with two_devices() as there, pytest.raises(ShapeError, match="on cpu; got"):
        address("keys", torch.zeros(2, 3).to(there), torch.float32, 2, 3)
