"""Models with weights spread over processes are told apart from whole ones."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import gracekv
from gracekv.distributed.sharding import WHOLE, connect, is_sharded
from gracekv.errors import ConfigError, UnsupportedModelError
from gracekv.testing.models import tiny_llama

PROMPT = gracekv.Prompt.from_ids(torch.arange(60), (4, 50))


@pytest.fixture
def one_process():
    """A process group of only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_plan(model):
    model._tp_size = 2  # as transformers marks it


def by_dtensor(model):
    mesh = dist.init_device_mesh("cpu", (1,))
    projection = model.get_decoder().layers[0].self_attn.k_proj
    weight = distribute_tensor(projection.weight.detach(), mesh, [Shard(0)])
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)


def by_hand(model):
    projection = model.get_decoder().layers[1].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach()[:16])


def test_a_whole_model_is_not_sharded():
    model = tiny_llama()
    assert not is_sharded(model)
    # Quantisers leave such layers if their packed weight has another name.
    del model.model.layers[0].mlp.up_proj.weight
    assert not is_sharded(model)
    assert connect(tiny_llama(), timeout=60) is WHOLE
    for wrong in (None, "60", 0, float("inf")):
        with pytest.raises(ConfigError, match="positive number of seconds"):
            connect(tiny_llama(), timeout=wrong)


def test_a_weight_divided_by_hand_is_seen_before_any_process_has_joined():
    assert not dist.is_initialized()
    model = tiny_llama()
    by_hand(model)
    assert is_sharded(model)


def by_stage(model):
    model._pp_stage = object()


@pytest.mark.parametrize("shard", [by_plan, by_dtensor, by_hand, by_stage])
def test_a_sharded_model_is_refused_by_name(shard, one_process):
    model = tiny_llama()
    shard(model)
    for call in (
        lambda: gracekv.compress(model, PROMPT, ratio=2),
        lambda: gracekv.capture(model, PROMPT),
        lambda: gracekv.hf.attach(model),
    ):
        with pytest.raises(UnsupportedModelError, match=r"sharded over processes.*device_map"):
            call()
    assert model.config._attn_implementation == "sdpa"
