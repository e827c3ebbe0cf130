"""Which changes the sample of the weights notices, and which weights it counts."""

import pytest
import torch

from gracekv.prefill.fingerprint import active_adapters, fingerprint, sample_places, sampled_digest
from gracekv.testing.models import tiny_llama


def weights_digest(model):
    return fingerprint(model)["weights"]


@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (576, 1536), (4, 64, 128), (0,), ()])
def test_places_are_fixed_and_lie_in_equal_parts(shape):
    places, size = sample_places("w", shape), torch.Size(shape).numel()
    assert torch.equal(places, sample_places.__wrapped__("w", shape))
    assert len(places) == min(16, size)
    if size:
        part = (torch.arange(17) * size // 16) if size > 16 else torch.arange(size + 1)
        assert bool(((places >= part[:-1]) & (places < part[1:])).all())


def test_places_are_spread_over_rows_and_columns():
    """64 weights of one shape have a place in every sixteenth of the rows and of the columns."""
    places = torch.cat([sample_places(f"w{x}", (256, 512)) for x in range(64)])
    rows, columns = torch.unravel_index(places, (256, 512))
    assert (rows // 16).unique().tolist() == (columns // 32).unique().tolist() == list(range(16))


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_matrix_rewritten_beside_its_first_column_is_noticed(name):
    model = tiny_llama()
    before = weights_digest(model)
    assert before == weights_digest(model)
    layer = model.model.layers[1]
    weight = getattr(layer.self_attn if name in ("q_proj", "o_proj") else layer.mlp, name).weight
    with torch.no_grad():
        weight[:, 1:] += 1e-3
    assert before != weights_digest(model)


def test_elements_are_compared_in_the_dtype_asked_for():
    weight = torch.linspace(1, 2, 320)
    rounded = sampled_digest([("w", weight.bfloat16())])
    assert sampled_digest([("w", weight)], dtype=torch.bfloat16) == rounded
    assert sampled_digest([("w", weight)]) != rounded


def test_parameters_kept_in_float32_count_as_the_model_computes():
    model = tiny_llama().bfloat16()
    before, norm = weights_digest(model), model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().float())
    assert weights_digest(model) == before
    norm.weight.data += 1
    assert weights_digest(model) != before


class Adapted(torch.nn.Module):
    """Like peft's layers: the linear layer, and adapters by name."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, linear, names):
        super().__init__()
        self.base_layer = linear
        self.lora_A, self.lora_B = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        for seed, name in enumerate(names):
            torch.manual_seed(seed)
            self.lora_A[name] = torch.nn.Linear(linear.in_features, 2, bias=False)
            self.lora_B[name] = torch.nn.Linear(2, linear.out_features, bias=False)
        self.active_adapters, self.disable_adapters = names[:1], False

    def forward(self, x):
        parts = [] if self.disable_adapters else self.active_adapters
        return self.base_layer(x) + sum(self.lora_B[n](self.lora_A[n](x)) for n in parts)


def adapted(names):
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj, names)
    return model, attention.q_proj


def test_active_adapters_count_by_name_and_weights():
    plain = weights_digest(tiny_llama())
    model, layer = adapted(["law", "poems"])
    law = weights_digest(model)
    assert active_adapters(model) == ["law"]
    assert law == weights_digest(adapted(["law"])[0]) != plain
    layer.active_adapters = ["poems"]
    assert active_adapters(model) == ["poems"]
    assert weights_digest(model) not in (law, plain)
    layer.disable_adapters = True
    assert active_adapters(model) == []
    assert weights_digest(model) == plain
    layer.disable_adapters, layer.active_adapters = False, ["law"]
    with torch.no_grad():
        layer.lora_B["law"].weight += 1
    assert weights_digest(model) != law


def test_saved_buffers_count_and_what_a_model_computes_on_the_way_does_not():
    model = tiny_llama()
    before = weights_digest(model)
    model.model.rotary_emb.inv_freq += 1
    assert weights_digest(model) == before
    model.register_buffer("qweight", torch.zeros(40))
    with_buffer = weights_digest(model)
    model.qweight += 1
    assert len({before, with_buffer, weights_digest(model)}) == 3
