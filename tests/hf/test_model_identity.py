"""A result belongs to the weights and adapters that made it; others raise a named error."""

from types import SimpleNamespace

import pytest
import torch

import gracekv
from gracekv.errors import CacheError, ConfigError, SavedCacheError, UnsupportedModelError
from gracekv.prefill.fingerprint import differences, fingerprint
from gracekv.testing.models import tiny_llama
from support.batches import Numbers

safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.randint(97, (80,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 80), tokenizer=Numbers())


@pytest.fixture
def model():
    return tiny_llama()


def replace_weights(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.data.add_(1e-2)


def result_of(model):
    return gracekv.compress(model, PROMPT, ratio=3, pipeline="gracekv-agnostic")


def test_a_passage_or_a_conversation_over_replaced_weights_is_refused(model):
    result = result_of(model)
    result.chat().close()
    replace_weights(model)
    for use in (result.chat, lambda: result.extend(IDS[:40], ratio=2)):
        with pytest.raises(CacheError, match=r"context is from another model: weights differ\."):
            use()


def test_a_model_is_the_same_with_and_without_offloaded_weights(model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    for made, other in ((model, offloaded), (offloaded, model)):
        result_of(made).save(tmp_path / "x")
        gracekv.load(tmp_path / "x", other)


def test_a_saved_result_is_of_the_weights_that_made_it(model, tmp_path):
    result = result_of(model)
    extended = result.extend(IDS[:40], ratio=2)
    replace_weights(model)
    for number, one in enumerate((result, extended)):
        path = tmp_path / f"{number}.gracekv"
        one.save(path)
        with pytest.raises(SavedCacheError, match="weights differ"):
            gracekv.load(path, model)
        again = gracekv.load(path, tiny_llama())
        again.save(path)
        assert gracekv.load(path, tiny_llama()).fingerprint == again.fingerprint
        assert again.fingerprint == one.fingerprint


def test_an_adapter_that_was_switched_is_refused_by_name(model, tmp_path):
    layer = model.model.layers[0].mlp
    layer.adapter_layer_names, layer.disable_adapters = (), False
    layer.active_adapters, layer.scaling = ["law"], {"law": 2.0, "poems": 1.0}
    result = result_of(model)
    result.save(tmp_path / "law.gracekv")
    # One that is loaded, but not active, changes nothing.
    layer.other_param_names = ("rank", "scales")
    layer.rank, layer.scales = None, torch.nn.ParameterDict({"poems": torch.ones(3)})
    gracekv.load(tmp_path / "law.gracekv", model)
    chat = result.chat()
    with pytest.raises(ConfigError, match="adapters that are active"):
        result.generate_ids(2, adapter_names=["poems"])
    layer.scaling["law"] = 1.0
    with pytest.raises(CacheError, match="another model: adapter_scales differ"):
        result.generate_ids(2)
    layer.scaling["law"] = 2.0
    layer.active_adapters = ["poems"]
    switched = r"adapters \(law then, poems now\)"
    with pytest.raises(SavedCacheError, match=switched):
        gracekv.load(tmp_path / "law.gracekv", model)
    with pytest.raises(CacheError, match=switched):
        result.extend(IDS[:40], ratio=2)
    with pytest.raises(CacheError, match=switched):
        result.generate_ids(2)
    with pytest.raises(CacheError, match=switched):
        chat.ask("1 2", 2)
    layer.disable_adapters = True
    with pytest.raises(SavedCacheError, match=r"adapters \(law then, none now\)"):
        gracekv.load(tmp_path / "law.gracekv", model)


class Adapted(torch.nn.Module):
    """Embeddings with a peft adapter, which do not expose their sizes."""

    def __init__(self, inner):
        super().__init__()
        self.base_layer = inner

    def forward(self, ids):
        return self.base_layer(ids)


def test_embeddings_may_have_an_adapter(model, tmp_path):
    model.set_input_embeddings(Adapted(model.get_input_embeddings()))
    result_of(model).save(tmp_path / "x.gracekv")
    loaded = gracekv.load(tmp_path / "x.gracekv", model)
    assert loaded.generate_ids(2).equal(result_of(tiny_llama()).generate_ids(2))


def test_an_adapter_that_depends_on_what_a_call_holds_is_refused(model):
    model.peft_config = {"default": SimpleNamespace(peft_type="PeftType.LILY")}
    with pytest.raises(UnsupportedModelError, match="activated LoRA, Lily"):
        result_of(model)


def test_a_model_on_apple_s_gpu_is_refused(model, monkeypatch):
    monkeypatch.setattr(type(model), "device", torch.device("mps"))
    with pytest.raises(UnsupportedModelError, match="lacks the float64"):
        result_of(model)


def test_a_file_whose_marks_are_no_mapping_is_of_another_model():
    marks = {"embed.weight": "0"}
    assert differences({"weights": "x"}, {"weights": marks}) == ["weights"]
    assert differences({"weights": marks}, {"weights": "x"}) == ["weights"]


class Repacked(torch.nn.Module):
    """A quantised layer that repacks its weight when it first runs."""

    def __init__(self, linear):
        super().__init__()
        self.scale = torch.nn.Parameter(linear.weight.detach().abs().max() / 127)
        rounded = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(rounded, requires_grad=False)

    def forward(self, x):
        if self.weight.ndim == 2:
            self.weight.data = self.weight.data[None]
        return x @ (self.weight[0].float() * self.scale).T


def quantised():
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "packed", "quantization_status": "frozen"}
    model.model.layers[0].mlp.up_proj = Repacked(model.model.layers[0].mlp.up_proj)
    return model


def test_layers_that_pack_their_weight_when_they_run_leave_a_model_what_it_is(tmp_path):
    path = tmp_path / "x.gracekv"
    result_of(quantised()).save(path)
    gracekv.load(path, quantised())
    other = quantised()
    other.model.norm.weight.data += 1
    with pytest.raises(SavedCacheError, match="its weights differ"):
        gracekv.load(path, other)


def test_fields_of_generation_leave_a_model_what_it_is(model, tmp_path):
    path = tmp_path / "x.gracekv"
    result = result_of(model)
    result.save(path)
    before = dict(result.fingerprint)
    model.config.pad_token_id, model.config.use_cache = 0, False
    gracekv.load(path, model)
    result.chat().close()
    result.extend(IDS[:40], ratio=2)
    now = fingerprint(model)
    assert now["config"] != before.pop("config_fields")
    # Like a file of an earlier version, whose hash includes them.
    assert differences(before, now) == ["config"]
    model.config.rms_norm_eps *= 2
    with pytest.raises(SavedCacheError, match=r"its config \(1 of .*rms_norm_eps first\) differ"):
        gracekv.load(path, model)
