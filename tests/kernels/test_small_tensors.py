"""Small tensors are made once for a GPU, and rows are views where they can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.kernels import small_tensors
from gracekv.kernels.small_tensors import filled, on_device, rows_at


@given(
    at=st.lists(st.integers(0, 9), max_size=10), run=st.tuples(st.integers(0, 9), st.integers(0, 9))
)
def test_rows(at, run):
    tensor = torch.arange(60.0).view(2, 10, 3)
    for chosen in (at, list(range(*run))):
        at_chosen = torch.tensor(chosen, dtype=torch.int64)
        assert torch.equal(rows_at(tensor, at_chosen), tensor[:, at_chosen])
    if run[0] < run[1]:
        assert rows_at(tensor, torch.arange(*run)).data_ptr() == tensor[:, run[0]].data_ptr()


@pytest.fixture
def copies(monkeypatch):
    """The keys of what is put on a GPU; the CPU stands for it."""
    made, upload = [], small_tensors._uploaded.__wrapped__

    def uploaded(data, dtype, shape, device, stream):
        made.append(data)
        return upload(data, dtype, shape, torch.device("cpu"), stream)

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("", (), {"cuda_stream": 0})
    )
    monkeypatch.setattr(small_tensors, "_uploaded", uploaded)
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
