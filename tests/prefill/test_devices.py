"""Sharded and offloaded models: every layer's entries are on the layer's device."""

import dataclasses
from contextlib import nullcontext
from itertools import cycle, product
from unittest.mock import Mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

accelerate = pytest.importorskip("accelerate")

import gracekv  # noqa: E402
from gracekv import recipes  # noqa: E402
from gracekv.distributed import HeadShard  # noqa: E402
from gracekv.errors import CacheError, CaptureMemoryError  # noqa: E402
from gracekv.hf import attach  # noqa: E402
from gracekv.hf.capture import capture  # noqa: E402
from gracekv.hf.load_result import layer_devices  # noqa: E402
from gracekv.prefill import depth_layers  # noqa: E402
from gracekv.segment.curvature import BlockInput  # noqa: E402
from gracekv.segment.surprisal import Surprisal  # noqa: E402
from gracekv.testing import synthetic_prefill  # noqa: E402
from gracekv.testing.models import tiny_model  # noqa: E402
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms  # noqa: E402
from support.covering import covering, every  # noqa: E402
from support.devices import CPU, SECOND_DEVICE, MixedDevicesError, two_devices  # noqa: E402
from support.margins import assert_same_tokens, logits_over  # noqa: E402
from support.prompts import random_prompt  # noqa: E402

PROMPT = random_prompt(120, (4, 108))

# Which of four layers are on the second device.
MAPS = {
    "second half": [CPU, CPU, SECOND_DEVICE, SECOND_DEVICE],
    "first half": [SECOND_DEVICE, SECOND_DEVICE, CPU, CPU],
    "all": [SECOND_DEVICE] * 4,
}


def test_the_second_device_is_kept_apart():
    with two_devices() as there:
        near, far = torch.arange(6.0), torch.arange(6.0).to(there)
        for mixed in (
            lambda: near + far, lambda: near.sum() * far, lambda: near[far.long()],
            lambda: torch.cat([near, far]), lambda: torch.stack([near.sum(), far.sum()]),
            lambda: far.masked_fill(near > 2, 0), lambda: near.view(2, 3) @ far.view(3, 2),
        ):  # fmt: skip
            with pytest.raises(MixedDevicesError):
                mixed()


def spread(prefill, devices):
    """The prefill as of a model on several devices; surprisal comes from the last one."""

    def put(tensors):
        return tuple(x.to(device) for x, device in zip(tensors, devices, strict=True))

    def place(observer):
        if isinstance(observer, BlockInput):
            return devices[depth_layers([observer.depth], len(devices))[0]]
        return devices[-1 if isinstance(observer, Surprisal) else 0]

    states = {name: put(getattr(prefill, name)) for name in ("keys", "values", "queries")}
    observed = {x: seen.to(place(x)) for x, seen in prefill.observed.items()}
    cos, sin = (x.to(devices[0]) for x in (prefill.rope.cos, prefill.rope.sin))
    rope = dataclasses.replace(prefill.rope, cos=cos, sin=sin)
    return dataclasses.replace(prefill, **states, observed=observed, rope=rope)


# In turn: a recipe that depends on the layers' devices would fail with any map.
@pytest.mark.parametrize(
    ("name", "where"),
    every(2, list(zip(recipes.names(), cycle(["second half", "first half", "all"])))),
)
def test_every_recipe_packs_each_layer_where_it_lies(name, where):
    prefill = synthetic_prefill(layers=4, context=100)
    pipeline, budget = gracekv.Pipeline.named(name), gracekv.Budget.ratio(4)
    expected = pipeline.run(prefill, budget).cache
    with two_devices():
        cache = pipeline.run(spread(prefill, MAPS[where]), budget).cache
        for layer, other, device in zip(cache.layers, expected.layers, MAPS[where], strict=True):
            stored = layer.tensors()
            assert {stored[name].device for name in stored if "offsets" not in name} == {device}
            if device == CPU and pipeline.fit.name == "none":  # and no memory of other layers
                assert all(x.untyped_storage().nbytes() <= 2 * x.nbytes for x in stored.values())
            # One fixed prompt, without near ties between engines.
            for one, two in zip(layer.index()[:2], other.index()[:2], strict=True):
                assert torch.equal(one, two)
            # A number halfway between two codes may be rounded either way.
            scales = [tensor for part, tensor in other.tensors().items() if "scale" in part]
            step = max((float(scale.max()) for scale in scales if len(scale)), default=0.0)
            # Fitted values solve systems whose products are summed in another order.
            fitted = pipeline.fit.name != "none"
            for head in range(layer.heads):
                (keys, values), (own_keys, own_values) = (x.head(head)[:2] for x in (layer, other))
                for one, two, loose in ((keys, own_keys, 0), (values, own_values, 1e-4 * fitted)):
                    room = {"rtol": 1.3e-6 + loose, "atol": 1e-5 + loose + 1.01 * step}
                    torch.testing.assert_close(one.cpu(), two, **room)


def test_a_score_of_all_layers_lies_where_each_layer_does():
    prefill, score = synthetic_prefill(layers=4), {"name": "value_norm", "scorer": "multi_hop"}
    with two_devices():
        prefill = spread(prefill, MAPS["second half"])
        gracekv.Pipeline.from_dict({"value": score}).run(prefill, gracekv.Budget.ratio(4))


def shard(model, devices):
    """Layers on `devices`, all else on the CPU; inputs are moved as accelerate moves them."""

    def mover(device):
        def move(module, args, kwargs):
            return tree_map_only(torch.Tensor, lambda x: x.to(device), (args, kwargs))

        return move

    decoder = model.get_decoder()
    for module, device in [*zip(decoder.layers, devices, strict=True), (decoder.norm, CPU)]:
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                part._parameters[name] = torch.nn.Parameter(weight.to(device), requires_grad=False)
        module.register_forward_pre_hook(mover(device), with_kwargs=True)
    return model


@pytest.mark.parametrize(("family", "where"), covering(list(product(["llama", "phi3"], MAPS))))
@torch.no_grad()
def test_a_sharded_model_is_captured_continued_and_cut(family, where):
    devices = MAPS[where]
    whole = gracekv.compress(tiny_model(family, layers=4), PROMPT, ratio=3)
    expected = whole.generate_ids(6)
    with two_devices():
        model = shard(tiny_model(family, layers=4), devices)
        prefill = capture(model, PROMPT)
        for name in ("keys", "values", "queries"):
            assert [x.device for x in getattr(prefill, name)] == devices
        assert prefill.observation(ProjectedNorms()).device == devices[0]

        result = gracekv.compress(model, PROMPT, ratio=3)

        assert [layer.keys.device for layer in result.packed.layers] == devices
        cache = result.new_cache()
        attach(model)
        token, new = PROMPT.ids[-1:], []
        for _ in range(6):
            token = model(token[None], past_key_values=cache).logits[0, -1:].argmax(-1)
            new.append(int(token))
        assert [layer._keys.device for layer in cache.layers] == devices

        limit, kept = gracekv.Limit(entries_per_head=60, every=4, window=2), []
        for one in (whole, result):
            cache = one.new_cache(limit)
            for token in PROMPT.ids[:20]:
                one.model(token[None, None], past_key_values=cache)
            assert cache.cuts
            kept.append([layer.packed.entries.index()[1].tolist() for layer in cache.grace_layers])
        assert [layer.packed.entries.device for layer in cache.grace_layers] == devices
    assert kept[0] == kept[1]
    assert_same_tokens(torch.tensor(new), expected, logits_over(whole))


def assert_generates_like(model, plain):
    """Up to ties: layers whose weights cannot be read are called, which rounds differently."""
    result, expected = (gracekv.compress(x, PROMPT, ratio=3) for x in (model, plain))
    assert_same_tokens(result.generate_ids(8), expected.generate_ids(8), logits_over(expected))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_offloaded_to_memory_are_fetched_when_used(family):
    """Between calls, every weight, including the embedding's, is on "meta"."""
    model = accelerate.cpu_offload(tiny_model(family), execution_device=CPU)
    assert {x.device.type for x in model.parameters()} == {"meta"}
    assert_generates_like(model, tiny_model(family))
    assert {x.device.type for x in model.parameters()} == {"meta"}


@pytest.mark.parametrize("classes", [["LlamaDecoderLayer"], ["LlamaModel"]])
def test_weights_that_their_layer_fetches_are_read_while_it_runs(classes):
    model = accelerate.cpu_offload(tiny_model(), CPU, preload_module_classes=classes)
    seen, want = (capture(x, PROMPT).observation(ProjectionNorms()) for x in (model, tiny_model()))
    torch.testing.assert_close(seen, want)


def test_a_context_of_a_model_that_was_moved_is_not_extended():
    prompt = gracekv.Prompt.from_ids(PROMPT.ids, (4, 120))
    with two_devices():
        result = gracekv.compress(tiny_model(layers=4), prompt, ratio=2)
        shard(result.model, MAPS["second half"])
        with pytest.raises(CacheError, match="context is on cpu, but the model computes on meta"):
            result.extend(PROMPT.ids[:9], ratio=2)


def test_a_file_is_loaded_to_where_offloaded_layers_compute():
    model = tiny_model()
    accelerate.cpu_offload(model.get_decoder().layers, execution_device="cuda:1")
    assert layer_devices(model) == [torch.device("cuda:1")] * 2


def test_a_device_map_with_layers_on_disk(tmp_path):
    whole = tiny_model(layers=3)
    reference = capture(whole, PROMPT)
    near = ("embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb")
    places = {"model.layers.1": "disk", "lm_head": "disk"} | {f"model.{x}": "cpu" for x in near}
    options = {"device_map": places, "main_device": "cpu", "offload_dir": tmp_path}
    model = accelerate.dispatch_model(tiny_model(layers=3), **options)
    assert model.model.layers[1].self_attn.o_proj.weight.is_meta
    prefill = capture(model, PROMPT)
    for observer, seen in reference.observed.items():
        torch.testing.assert_close(prefill.observation(observer), seen)
    # Exact: the layers call the same functions on the same weights.
    assert all(map(torch.equal, prefill.keys, reference.keys))
    assert_generates_like(model, whole)


def test_a_prompt_has_room_on_all_gpus_of_a_model_together(monkeypatch):
    model = tiny_model()
    gpus = [Mock(device=torch.device("cuda", n), dtype=torch.float32) for n in range(2)]
    monkeypatch.setattr(model, "parameters", lambda: iter(gpus))
    monkeypatch.setattr(type(model), "device", gpus[0].device)
    # It takes 400 kB.
    monkeypatch.setattr("gracekv.hf.capture.free_bytes", lambda gpu: 300_000)
    assert capture(model, PROMPT).layers == 2
    # Too little for all heads but enough for half of them; another process may have less.
    monkeypatch.setattr("gracekv.hf.capture.free_bytes", lambda gpu: 175_000)
    with pytest.raises(CaptureMemoryError):
        capture(model, PROMPT)
    for least, enough in ((350_000, True), (9_000, False)):
        shard = HeadShard(0, 2, lambda x, other=-least: [x, torch.tensor(other)])
        monkeypatch.setattr("gracekv.hf.capture.head_shard", lambda model, shard=shard: shard)
        with nullcontext() if enough else pytest.raises(CaptureMemoryError):
            capture(model, PROMPT)
