"""Small tensors are created once per GPU."""

from unittest.mock import Mock

import pytest
import torch

from gracekv.kernels import uploads
from gracekv.kernels.uploads import filled, on_device, upload


@pytest.fixture
def copies(monkeypatch):
    """The keys of uploads to a GPU, for which the CPU stands in."""
    made, upload = [], uploads._uploaded.__wrapped__

    def uploaded(data, dtype, shape, device, stream):
        made.append(data)
        return upload(data, dtype, shape, torch.device("cpu"), stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("", (), {"cuda_stream": 0}))
    monkeypatch.setattr(uploads, "_uploaded", uploaded)
    return made


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_what_goes_to_a_gpu_comes_back(copies, dtype):
    for values in (torch.tensor([[3, 0, 1]]).to(dtype), torch.zeros(0, 2, dtype=dtype)):
        there = on_device(values, torch.device("cuda", 0))
        assert torch.equal(there, values)
        assert there.dtype == dtype
    assert len(copies) == 2


def test_on_a_cpu_every_caller_has_its_own():
    assert filled(3, 2.0, torch.float32, torch.device("cpu")).tolist() == [2.0, 2.0, 2.0]
    values = torch.arange(3)
    assert on_device(values, torch.device("cpu")) is values


@pytest.mark.parametrize("kind", ["cuda", "mps", "cpu"])
def test_only_cuda_is_not_waited_for(kind):
    """Other devices may read the host's memory after the call."""
    tensor, device = Mock(), torch.device(kind)
    upload(tensor, device)
    tensor.to.assert_called_once_with(device, non_blocking=kind == "cuda")
