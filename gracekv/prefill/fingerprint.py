"""Fingerprints of the model and tokenizer of a prefill.

A few elements of each weight are read, on its own device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.distributed.sharding import is_sharded
from gracekv.errors import CacheError
from gracekv.kernels.device import obstacle
from gracekv.kernels.uploads import upload

# Config fields that do not affect a model's computation: those added by saving, and those set at
# runtime.
_SAVING = {"transformers_version", "architectures", "dtype", "name_or_path"}
_RUNTIME = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_status"}
# How quantised layers are computed: chosen by the machine or by `from_pretrained`.
_RUNTIME |= {"backend", "max_input_length", "tune_metadata"}
# Marks that replace others if both sides have them.
_BETTER = {"config": "config_fields", "weights": "plain_weights"}


def fingerprint(model: Any, tokenizer: Any = None) -> Mapping[str, Any]:
    """The marks that identify a model and its tokenizer.

    Class, name, dtype, active adapters, a hash of each config field that affects the computation
    (files of earlier versions have one of the whole config), and a hash of names, shapes and a few
    elements of all weights. A quantised model also has one without its quantised layers, which is
    compared instead. Tokenizers add `tokenizer_marks`. Inactive adapters do not count, nor do
    elements of weights of a quantising class, which cannot be read. If some weights are offloaded
    or sharded over processes, there is no hash of weights, so they are not compared.
    """
    marks: dict[str, Any] = quick_marks(model)
    config = model.config.to_dict().items()
    public = {k: x for k, x in config if not k.startswith("_") and k not in _SAVING}
    marks["config"] = _fields_digest(public)
    fields = _without(public, _SAVING | _RUNTIME)
    marks["config_fields"] = {str(k): _fields_digest(x) for k, x in fields.items()}
    weights = dict(_weights(model))
    here = not any(weight.is_meta or not weight.numel() for weight in weights.values())
    if here and not is_sharded(model):
        marks["weights"] = sampled_digest(weights.items(), parameters=model.dtype)
        if "quantization_config" in public or not all(map(_is_plain, weights.values())):
            packed = {n.replace(".base_layer", "") for n, x in model.named_modules() if _packs(x)}
            plain = [x for x in weights.items() if x[0].rpartition(".")[0] not in packed]
            marks["plain_weights"] = sampled_digest(plain, parameters=model.dtype)
    return marks if tokenizer is None else marks | tokenizer_marks(tokenizer)


def quick_marks(model: Any) -> dict[str, str]:
    """The marks of a model that are fast to read: class, name, dtype, active adapters, scales."""
    # Adapters with a scale call it "scaling"; peft may change it while a model is in use.
    adapted = _adapter_layers(model)
    scales = {
        name: {x: float(layer.scaling[x]) for x in _active(layer) if x in layer.scaling}
        for name, layer in adapted.items()
        if isinstance(getattr(layer, "scaling", None), dict)
    }
    return {
        "model_class": type(model).__name__,
        "model_name": str(getattr(model.config, "name_or_path", "")),
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapters": ", ".join(_active_names(adapted)),
        "adapter_scales": _fields_digest(scales),
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The marks that differ between two models or tokenizers, worded for an error message.

    A mark that is missing or None on either side is not compared, nor is the whole config if both
    have hashes of its fields. Mappings, such as the digests of weights by name, are compared over
    their common items, since config fields differ between versions of transformers.
    """
    texts = []
    # The model's path may differ between machines; its computation may not.
    names = saved.keys() & current.keys() - {"model_name"}
    for name in sorted(x for x in names if _BETTER.get(x) not in names):
        old, new = saved[name], current[name]
        if old == new or old is None or new is None:
            continue
        words = name.removesuffix("_fields").removeprefix("plain_")
        if name in ("adapters", "dtype"):
            words = f"{name} ({old or 'none'} then, {new or 'none'} now)"
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            # Checkpoints may hold experts under different names, and tied weights twice.
            shared = [x for x in sorted(old.keys() & new.keys()) if new[x] is not None]
            changed = [x for x in shared if old[x] != new[x]]
            if shared and not changed:
                continue
            first = f", {changed[0]} first" if changed else ""
            words = f"{words} ({len(changed)} of {len(shared)}{first})"
        texts.append(words)
    return texts


def check_same_model(
    saved: Mapping[str, Any], model: Any, what: str, fix: str, marks: Any = fingerprint
) -> None:
    """Raise `CacheError` if `model` did not make `what`, whose marks are `saved`.

    `fix` ends the message, and `marks` computes the marks of a model.
    """
    if other := differences(saved, marks(model)):
        raise CacheError(f"{what} is from another model: {', '.join(other)} differ. {fix}")


def tokenizer_marks(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer's chat template and, if it has `get_vocab`, of its vocabulary."""
    marks = {"chat_template": _digest(repr(getattr(tokenizer, "chat_template", None)))}
    if hasattr(tokenizer, "get_vocab"):
        try:
            marks["tokenizer"] = _vocabulary(weakref.ref(tokenizer), len(tokenizer))
        except TypeError:  # without length, hash or weak references
            marks["tokenizer"] = _vocabulary.__wrapped__(lambda: tokenizer, 0)
    return marks


@functools.lru_cache(maxsize=16)
def _vocabulary(tokenizer: Callable[[], Any], size: int) -> str:
    """Hash of a vocabulary, which takes 0.1 to 0.5 s; added tokens change its `size`."""
    return _digest(repr(sorted(tokenizer().get_vocab().items())))


def _without(config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The public fields of a config and its nested configs, except `names`."""
    kept = {k: x for k, x in config.items() if not str(k).startswith("_") and k not in names}
    return {k: _without(x, names) if isinstance(x, dict) else x for k, x in kept.items()}


def _fields_digest(fields: Any) -> str:
    return _digest(json.dumps(fields, sort_keys=True, default=repr))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Number of elements read of each weight, since all would be the whole model. Source: ours.
_READS = 16


def active_adapters(model: Any) -> list[str]:
    """Sorted names of the peft adapters that are active in the model's computation."""
    return _active_names(_adapter_layers(model))


@functools.lru_cache(maxsize=4096)
def sample_places(name: str, shape: tuple[int, ...]) -> Tensor:
    """int64 [n]: flat indices of the elements that are read of a weight, from its name and shape.

    The weight is cut into n equal parts, and a hash of name and shape chooses one element in each,
    so they are spread over rows and columns.
    """
    size = math.prod(shape)
    count = min(_READS, size)
    edges = np.arange(count + 1, dtype=np.int64) * size // max(1, count)
    noise = hashlib.shake_256(f"{name} {list(shape)}".encode()).digest(8 * count)
    return torch.from_numpy(edges[:-1] + np.frombuffer(noise, np.int64, count) % np.diff(edges))


def sampled_digest(
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    parameters: torch.dtype | None = None,
) -> str:
    """16 hexadecimal digits of the weights' names and shapes, and of their elements at
    `sample_places`.

    Args:
        weights: [...] by name, none on the device "meta"; their order matters.
        dtype: convert elements to this dtype first; by default they keep the weight's dtype.
        parameters: convert elements of float32 parameters to this dtype first, since versions of
            transformers differ in which parameters of a 16-bit model, such as routers, stay
            float32.
    """
    marks, kinds = dict[str, bytes](), dict[str, torch.dtype]()
    by_device: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = defaultdict(dict)
    for name, weight in weights:
        data, at = weight.detach(), sample_places(name, tuple(weight.shape))
        single = isinstance(weight, torch.nn.Parameter) and weight.dtype == torch.float32
        kinds[name] = dtype or (parameters if parameters and single else weight.dtype)
        marks[name] = f"{name} {list(weight.shape)} {kinds[name]} ".encode()
        # Quantised tensors of their own class may not support slicing.
        if len(at) and type(data) is Tensor:
            by_device[data.device][name] = data, at
    for device, group in by_device.items():
        for name, few in zip(group, _elements(device, list(group.values())), strict=True):
            kind = group[name][0].dtype
            elements = few if kind == kinds[name] else few.clone().view(kind).to(kinds[name])
            marks[name] += elements.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(b"".join(marks.values())).hexdigest()[:16]


def _elements(device: torch.device, weights: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The elements of each weight on `device` at flat indices, as uint8 on the CPU.

    On a GPU, one launch reads all of them if possible, since the host waits for every copy.
    """
    flat, places = [data.reshape(-1) for data, _ in weights], torch.cat([at for _, at in weights])
    counts = [len(at) for _, at in weights]
    if obstacle(device, "torch") is None:
        # Imported here, so that gracekv can be imported without triton.
        from gracekv.kernels.bytes_triton import bytes_at

        # With NumPy, since torch would wake all its threads for so few numbers.
        start, width = np.array([(x.data_ptr(), x.itemsize) for x in flat]).repeat(counts, axis=0).T
        first = (start + places.numpy() * width - (width.cumsum() - width)).repeat(width)
        first = torch.from_numpy(first + np.arange(len(first)))
        result = bytes_at(upload(first, device))
    else:
        pairs = zip(flat, places.to(device).split(counts), strict=True)
        result = torch.cat([x[at].view(torch.uint8) for x, at in pairs])
    return list(result.cpu().split([n * x.itemsize for n, x in zip(counts, flat, strict=True)]))


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by name, as if inactive adapters had not been added."""
    idle = [
        f"{prefix}.{part}.{name}."
        for prefix, layer in _adapter_layers(model).items()
        for part in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ()))
        for name in set(getattr(layer, part, None) or ()) - set(_active(layer))
    ]
    buffers = (
        (f"{prefix}.{name}", buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        # Non-persistent buffers hold computed values, such as the frequencies of RoPE.
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    for name, weight in (*model.named_parameters(), *buffers):
        if not f"{name}.".startswith(tuple(idle)):
            yield name.replace(".base_layer.", "."), weight


def _packs(module: torch.nn.Module) -> bool:
    """Whether a layer is quantised and so may repack its weights when it first runs."""
    own = *module.parameters(False), *module.buffers(False)
    return hasattr(module, "quantization_scheme") or not all(map(_is_plain, own))


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_floating_point() and x.itemsize > 1


def _adapter_layers(model: Any) -> dict[str, Any]:
    """The layers with adapters, by name; recognised by the attributes that peft adds."""
    return {name: x for name, x in model.named_modules() if hasattr(x, "adapter_layer_names")}


def _active_names(layers: Mapping[str, Any]) -> list[str]:
    return sorted({name for layer in layers.values() for name in _active(layer)})


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else list(layer.active_adapters)
