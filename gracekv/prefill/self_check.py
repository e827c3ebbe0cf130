"""Tries a model of an untested family on a short random prompt.

Compression takes attention for what most models compute: softmax(s q.k + mask) v, capped or with
sinks where the model says so, over the keys that the cache holds, which RoPE rotates in one of a
few ways, or not at all. Both are computed here from what a model's attention modules hand to
transformers' attention function, and compared with what the model itself gives. Source: ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError, UntestedModelWarning
from gracekv.kernels.logits import capped, softmax
from gracekv.prefill.attention_patch import (
    AttentionCall,
    input_device,
    own_thread,
    patched_attention,
)
from gracekv.prefill.model_layers import (
    ROTATIONS,
    Rotation,
    attention_module,
    compressed_layers,
    has_rope,
    model_layers,
    output_projection,
    remember_rotations,
    rope_of_table,
)
from gracekv.undo import hooked

_TOKENS = 24
# The largest difference, relative to what the model gives: rounding, by the bytes of a number.
_TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 0.1}

_passed: WeakSet[Any] = WeakSet()


class _Enough(Exception):
    """Ends an attention module's forward once its key is known."""


@torch.no_grad()
def self_check(model: Any) -> None:
    """Try `model`, once: its attention, its rotations, and a step over cached keys and values.

    Warns (`UntestedModelWarning`) if all are as expected. Raises `UnsupportedModelError` with the
    first layer that differs, or what else does.
    """
    if model in _passed:
        return
    name, family = type(model).__name__, model.config.model_type
    attending = {
        layer.number: attention_module(model.get_decoder().layers[layer.number])
        for layer in model_layers(model)
        if layer.has_attention
    }
    for number, attention in attending.items():
        if output_projection(attention) is None:
            layer = model.get_decoder().layers[number]
            raise UnsupportedModelError(
                f"Layer {number} of {name} ({family}) is a {type(layer).__name__} without the "
                f"modules self_attn and self_attn.o_proj, which gracekv reads."
            )
        if hasattr(attention, "kv_b_proj"):
            raise UnsupportedModelError(
                f"Layer {number} of {name} ({family}) has multi-head latent attention (MLA): its "
                f"cache holds one small latent of each token for all heads, which gracekv does not "
                f"compress; it compresses keys and values of heads."
            )
    ids = torch.arange(1, _TOKENS + 1) * 7919 % model.get_input_embeddings().num_embeddings
    ids = ids[None].to(input_device(model))
    seen = _Seen()
    with patched_attention(model, seen.attend), hooked() as hooks:
        for number, attention in attending.items():
            before = own_thread(seen.before(number))
            hooks.append(attention.register_forward_pre_hook(before, with_kwargs=True))
        stock = model(input_ids=ids, use_cache=False).logits[0, -1]
    missing = sorted(attending.keys() - seen.keys.keys())
    if missing:
        raise UnsupportedModelError(
            f"Layer {missing[0]} of {name} ({family}) does not call transformers' attention "
            f"function, so gracekv cannot read its keys and queries."
        )
    for number, difference in sorted(seen.differences.items()):
        if difference > _tolerance(model):
            raise UnsupportedModelError(
                f"The attention of layer {number} of {name} ({family}) differs by "
                f"{difference:.1g} from softmax attention over its keys; gracekv computes nothing "
                f"else for a family that it does not know."
            )
    rotations = _rotations(model, seen)
    again = _last_step(model, ids, seen)
    difference = _difference(again, stock)
    if difference > _tolerance(model):
        raise UnsupportedModelError(
            f"A step of {name} ({family}) over cached keys, values and states differs by "
            f"{difference:.1g} from the whole prompt at once, so it keeps more than them between "
            f"steps."
        )
    remember_rotations(model, rotations)
    _passed.add(model)
    warnings.warn(
        f"The model family {family!r} is not tested with gracekv. A short random prompt gave what "
        f"the model itself gives, so it is used; compare some answers at ratio=1.",
        UntestedModelWarning,
        stacklevel=5,
    )


class _Seen:
    """What the attention modules were given and computed."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.differences: dict[int, float] = {}
        self.inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def before(self, number: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[number] = args, kwargs

        return hook

    def attend(self, call: AttentionCall) -> Any:
        self.keys[call.layer], self.values[call.layer] = call.key, call.value
        output = call.output(call.query, call.key, call.value, call.mask)
        plain = _softmax_attention(call.query, call.key, call.value, call)
        self.differences[call.layer] = _difference(plain, output[0])
        return output


def _rotations(model: Any, seen: _Seen) -> dict[int, Rotation]:
    """The rotation of each layer: the one that turns its plain keys into its rotated ones."""
    plain: dict[int, Tensor] = {}

    def catch(call: AttentionCall) -> Any:
        plain[call.layer] = call.key
        raise _Enough

    rotations: dict[int, Rotation] = {}
    with patched_attention(model, catch):
        for number, (args, kwargs) in seen.inputs.items():
            pair = kwargs.get("position_embeddings")
            if pair is None and not has_rope(model):
                rotations[number] = "none"
                continue
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise UnsupportedModelError(
                    f"Layer {number} of {type(model).__name__} ({model.config.model_type}) is not "
                    f"given cos and sin as `position_embeddings`, so its rotation is unknown."
                )
            cos, sin = pair
            still = kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
            with suppress(_Enough):
                attention_module(model.get_decoder().layers[number])(*args, **still)
            rotations[number] = _rotation(model, number, plain[number], seen.keys[number], cos, sin)
    return rotations


def _rotation(
    model: Any, number: int, plain: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor
) -> Rotation:
    places, differences = torch.arange(cos.shape[1]), dict[Rotation, float]()
    for rotation in ROTATIONS:
        rope = rope_of_table(cos[0].float(), sin[0].float(), rotation)
        if rope.cos.shape[1] <= plain.shape[-1]:
            made = rope.rotate(plain[0].float(), places)
            differences[rotation] = _difference(made, rotated[0])
    best = min(differences, key=lambda rotation: differences[rotation])
    if differences[best] <= _tolerance(model):
        return best
    raise UnsupportedModelError(
        f"Layer {number} of {type(model).__name__} ({model.config.model_type}) rotates its keys in "
        f"a way that gracekv does not know; it knows {', '.join(ROTATIONS)}."
    )


def _last_step(model: Any, ids: Tensor, seen: _Seen) -> Tensor:
    """Logits [vocabulary] of the last token over what is cached of those before it."""
    from gracekv.prefill.stock_cache import StockLayers

    keys, values, others = dict(seen.keys), dict(seen.values), StockLayers(model, (), 0)
    count, with_states = ids.shape[1], any(layer.has_states for layer in model_layers(model))
    # Sliding layers beside states have their window from the stock cache.
    by_hand = {x.number for x in (compressed_layers if with_states else model_layers)(model)}
    options: dict[str, Any] = {"use_cache": False}
    if with_states:
        options = others.options()
        try:
            model(input_ids=ids[:, :-1], **options)
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} ({model.config.model_type}) does not run over the cache "
                f"layers that transformers has for its kinds of layers: {error}"
            ) from error
        others.read(1)

    def step(call: AttentionCall) -> Any:
        key, value = call.key, call.value
        if call.layer in by_hand:
            key, value = (
                torch.cat([known[call.layer][:, :, :-1], new], dim=2)
                for known, new in ((keys, key), (values, value))
            )
        output = _softmax_attention(call.query, key, value, call)
        return output.to(call.query.dtype), None

    with patched_attention(model, step):
        place = torch.tensor([[count - 1]], device=ids.device)
        output = model(input_ids=ids[:, -1:], position_ids=place, **options)
    logits: Tensor = output.logits[0, -1]
    return logits


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """float32 [B, Q, H, d]; the queries are the last of the keys' tokens."""
    sinks, window = call.logits["sinks"], call.options.get("sliding_window")
    group, count, length = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    logits = capped(call.scale * query.float() @ key.mT, call.logits["softcap"])
    hidden = torch.ones(count, length, dtype=torch.bool, device=key.device)
    hidden = hidden.triu(length - count + 1) | hidden.tril(length - count - (window or length))
    shares = softmax(
        logits.masked_fill_(hidden, -torch.inf), None if sinks is None else sinks[:, None, None]
    )
    return (shares @ value).transpose(1, 2)


def _difference(got: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    wanted = wanted.float()
    return float((got.float() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _tolerance(model: Any) -> float:
    return _TOLERANCE[model.dtype.itemsize]
