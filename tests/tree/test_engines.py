"""Which engine is taken where, and what is said where one cannot be had."""

import importlib.util

import pytest
import torch

from gracekv.errors import BackendUnavailableError, ConfigError
from gracekv.kernels import device as host
from gracekv.tree import Prototype
from gracekv.tree.engines import pick
from support.devices import SecondDeviceTensor

VALUES = torch.zeros(3, 64)


@pytest.fixture
def there(monkeypatch):
    """A function that says which packages are installed and what GPU there is."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def say(*packages, capability=None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(host, "capability", lambda device: capability)

    return say


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    device = torch.device("cuda:0")


@pytest.fixture
def gpu_values(monkeypatch):
    # To `pick` it must be a plain tensor, and no plain tensor lies on a GPU that is not there.
    monkeypatch.setattr("gracekv.tree.engines.Tensor", OnGpu)
    return torch.zeros(3, 64).as_subclass(OnGpu)


def test_auto_on_a_cpu(there):
    there("numba", "triton")
    assert pick("auto", VALUES) == "numba"
    there("triton")
    assert pick("auto", VALUES) == "torch"


def test_auto_on_a_gpu(there, gpu_values):
    there("numba", "triton", capability=(9, 0))
    assert pick("auto", gpu_values) == "triton"
    assert pick("torch", gpu_values) == "torch"
    assert pick("auto", torch.zeros(3, 288).as_subclass(OnGpu)) == "torch"
    there("numba", "triton", capability=(7, 5))
    assert pick("auto", gpu_values) == "torch"
    there("numba", capability=(9, 0))
    assert pick("auto", gpu_values) == "torch"


def test_what_cannot_be_had_is_refused(there, gpu_values):
    there("numba", "triton", capability=(7, 5))
    for engine, values, message in [
        ("numba", gpu_values, r'lies on cuda:0. pip install "gracekv\[cpu\]"'),
        ("triton", gpu_values, "capability 7.5; the kernels need 8.0 or newer. Use engine 'torch'"),
        ("triton", torch.zeros(3, 257).as_subclass(OnGpu), "256 or less; got 257. Use engine"),
        ("triton", VALUES, "plain tensors; the cache is of type Tensor. Use engine 'torch'"),
    ]:
        with pytest.raises(BackendUnavailableError, match=message):
            pick(engine, values)
    there("numba")
    with pytest.raises(BackendUnavailableError, match=r"pip install 'gracekv\[triton\]'"):
        pick("triton", gpu_values)


def test_a_cpu_is_no_place_for_it(there):
    there("numba", "triton")
    with pytest.raises(BackendUnavailableError, match=r"lies on cpu;.*or use engine 'torch'"):
        pick("triton", VALUES)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="auto, numba, torch, triton; got 'cuda'"):
        Prototype(engine="cuda")


def test_a_tensor_without_memory_of_its_own_goes_to_torch(there):
    there("numba", "triton")
    values = SecondDeviceTensor(torch.zeros(3, 64))
    assert pick("auto", values) == "torch"
    with pytest.raises(BackendUnavailableError, match="needs a cache on a CPU"):
        pick("numba", values)
    with pytest.raises(
        BackendUnavailableError, match=r"of type SecondDeviceTensor\. Use engine 'torch'"
    ):
        pick("triton", values)
