"""Decoding over a compressed cache as dense masked attention in float64: slow but obvious."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries

_NAME = "gracekv_dense_reference"


@torch.no_grad()
def dense_logits(model: Any, cache: RaggedCache, tokens: Tensor, drop_bias: bool = False) -> Tensor:
    """[n, vocabulary] float64 logits after each of `tokens` [n], fed one by one after `cache`.

    A float64 copy of the model runs its own forward pass over a stock cache in which every packed
    entry is at its position; the positions in between are masked, and the log multiplicities are
    added to the logits. With `drop_bias` they are not, to show that a comparison would notice.
    """
    from transformers import DynamicCache

    precise = copy.deepcopy(model).double()
    # The fast product over experts does not support float64.
    precise.config._experts_implementation = "eager"
    for module in precise.modules():
        # The stock ones compute in float32.
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _rms_norm(module)
        elif type(module).__name__ == "Cohere2LayerNorm":
            module.forward = _layer_norm(module)
    with_states = [x for x in cache.other_layers if x.window is None]
    past = DynamicCache(config=precise.config) if with_states else DynamicCache()
    for state in with_states:
        for name, tensor in state.tensors.items():
            getattr(past, f"update_{name}_state")(tensor.double(), state.number)
    biases: dict[int, Tensor] = {}
    held: dict[int, tuple[Tensor, Tensor]] = {
        x.number: (x.tensors["keys"].double(), x.tensors["values"].double())
        for x in cache.other_layers
        if x.window is not None
    }
    for number, layer in zip(cache.model_layers, cache.layers, strict=True):
        keys, values, bias = _dense(layer, cache.length)
        held[number] = keys[None], values[None]
        biases[number] = torch.where(bias == -math.inf, bias, 0.0) if drop_bias else bias
    for number in sorted(held):
        past.update(*held[number], number)
    logits = []
    windows = {x.number: x.window for x in cache.other_layers if x.window is not None}
    with _attention(precise, biases, windows):
        for step, token in enumerate(tokens):
            position = torch.tensor([[cache.length + step]])
            output = precise(token.view(1, 1), past_key_values=past, position_ids=position)
            logits.append(output.logits[0, -1].double())
    return torch.stack(logits)


def _dense(layer: RaggedEntries, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [G, length, d] and the bias [G, length], -inf where nothing was kept."""
    shape = (layer.heads, length, layer.keys.shape[-1])
    keys, values = torch.zeros(2, *shape, dtype=torch.float64)
    bias = torch.full(shape[:2], -math.inf, dtype=torch.float64)
    for g in range(layer.heads):
        head_keys, head_values, positions, log_multiplicity = layer.head(g)
        keys[g, positions.long()] = head_keys.double()
        values[g, positions.long()] = head_values.double()
        bias[g, positions.long()] = log_multiplicity.double()
    return keys, values, bias


def _rms_norm(module: Any) -> Any:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    # Gemma 1 to 3, Qwen3-Next and Qwen3.5 store the difference from one; some have no weight.
    name, weight = type(module).__name__, getattr(module, "weight", 1.0)
    if name.startswith(("Gemma", "Qwen3Next", "Qwen3_5")) and not name.startswith("Gemma4"):
        weight = weight + 1.0
    return lambda x: weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _layer_norm(module: Any) -> Any:
    return lambda x: (
        module.weight * torch.nn.functional.layer_norm(x, x.shape[-1:], eps=module.variance_epsilon)
    )


@contextmanager
def _attention(model: Any, biases: dict[int, Tensor], windows: dict[int, int]) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        if module.layer_idx in windows:
            key, value = (x[:, :, -windows[module.layer_idx] :] for x in (key, value))
            bias = key.new_zeros(key.shape[1], key.shape[2])
        else:
            bias = biases[module.layer_idx]
        tail = bias.new_zeros(len(bias), key.shape[2] - bias.shape[1])
        every = torch.cat([bias, tail], dim=1).repeat_interleave(group, dim=0)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
        logits, cap = query @ keys.mT * kwargs["scaling"], kwargs.get("softcap")
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        logits, sinks = logits + every[None, :, None], kwargs.get("s_aux")
        if sinks is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1)], dim=-1)
        return (logits.softmax(-1)[..., : keys.shape[2]] @ values).transpose(1, 2), None

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, lambda **_: None)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        AttentionInterface._global_mapping.pop(_NAME)
        AttentionMaskInterface._global_mapping.pop(_NAME)
