"""Which engine is selected, and the error if one cannot run."""

import importlib.util

import pytest
import torch

from gracekv.errors import BackendUnavailableError, ConfigError
from gracekv.kernels import device as host
from gracekv.tree import Prototype
from gracekv.tree.engines.base import select_engine
from support.devices import SecondDeviceTensor

VALUES = torch.zeros(3, 64)


@pytest.fixture
def machine(monkeypatch):
    """A function that sets which packages are installed and which GPU the machine has."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def say(*packages, capability=None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(host, "capability", lambda device: capability)

    return say


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda:0")


@pytest.fixture
def gpu_values(monkeypatch):
    # `select_engine` takes it for a plain tensor; real GPU tensors need a GPU.
    monkeypatch.setattr("gracekv.tree.engines.base.Tensor", OnGpu)
    return torch.zeros(3, 64).as_subclass(OnGpu)


def test_auto_on_a_cpu(machine):
    machine("numba", "triton")
    assert select_engine("auto", VALUES) == "numba"
    machine("triton")
    assert select_engine("auto", VALUES) == "torch"


def test_auto_on_a_gpu(machine, gpu_values):
    machine("numba", "triton", capability=(9, 0))
    assert select_engine("auto", gpu_values) == "triton"
    assert select_engine("torch", gpu_values) == "torch"
    assert select_engine("auto", torch.zeros(3, 288).as_subclass(OnGpu)) == "torch"
    machine("numba", "triton", capability=(7, 5))
    assert select_engine("auto", gpu_values) == "torch"
    machine("numba", capability=(9, 0))
    assert select_engine("auto", gpu_values) == "torch"


def test_an_engine_that_cannot_run_is_refused(machine, gpu_values):
    machine("numba", "triton", capability=(7, 5))
    for engine, values, message in [
        ("numba", gpu_values, r"is on cuda:0\. Move it"),
        ("triton", gpu_values, "capability 7.5; the kernels need 8.0 or newer. Use engine 'torch'"),
        ("triton", torch.zeros(3, 257).as_subclass(OnGpu), "256 or less; got 257. Use engine"),
        ("triton", VALUES, "plain tensors; the cache is of type Tensor. Use engine 'torch'"),
    ]:
        with pytest.raises(BackendUnavailableError, match=message):
            select_engine(engine, values)
    machine("numba")
    with pytest.raises(BackendUnavailableError, match=r"pip install 'gracekv\[triton\]'"):
        select_engine("triton", gpu_values)


def test_triton_on_a_cpu_is_refused(machine):
    machine("numba", "triton")
    with pytest.raises(BackendUnavailableError, match=r"is on cpu;.*or use engine 'torch'"):
        select_engine("triton", VALUES)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match=r"one of 'auto', 'numba', 'torch', 'triton'; got 'cuda'"):
        Prototype(engine="cuda")


def test_a_tensor_without_memory_of_its_own_goes_to_torch(machine):
    machine("numba", "triton")
    values = SecondDeviceTensor(torch.zeros(3, 64))
    assert select_engine("auto", values) == "torch"
    for engine in ("numba", "triton"):
        with pytest.raises(BackendUnavailableError, match=r"of type SecondDeviceTensor\. Use"):
            select_engine(engine, values)
