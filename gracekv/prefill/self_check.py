"""Tries a model of an untested family on a short random prompt.

Compression takes attention for what most models compute: softmax(s q.k + mask) v, capped or with
sinks where the model says so, over the keys that the cache holds, which RoPE rotates in one of a
few ways, or not at all. Both are computed here from what a model's attention modules hand to
transformers' attention function, and compared with what the model itself gives. Source: ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError, UntestedModelWarning
from gracekv.kernels.linalg import capped, softmax
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
    """Try `model`, once: its rotations, and a step over cached keys, values and states.

    Warns (`UntestedModelWarning`) if all are as expected. Raises `UnsupportedModelError` with the
    first layer that differs, or what else does.
    """
    if model in _passed:
        return
    family, layers = model.config.model_type, model.get_decoder().layers
    numbers = [layer.number for layer in model_layers(model) if layer.has_attention]
    attending = {number: attention_module(layers[number]) for number in numbers}
    for number, attention in attending.items():
        if output_projection(attention) is None or hasattr(attention, "kv_b_proj"):
            raise _refusal(
                model,
                f"is a {type(layers[number]).__name__}, without the modules self_attn and "
                f"self_attn.o_proj over keys and values of heads, which gracekv reads; multi-head "
                f"latent attention (MLA) caches one latent of each token for all heads",
                number,
            )
    ids = torch.arange(1, _TOKENS + 1) * 7919 % model.get_input_embeddings().num_embeddings
    ids = ids[None].to(input_device(model))
    calls: dict[int, AttentionCall] = {}
    inputs: dict[int, tuple[Any, Any]] = {}

    def attend(call: AttentionCall) -> Any:
        calls[call.layer] = call
        return call.output(call.query, call.key, call.value, call.mask)

    with patched_attention(model, attend), hooked() as hooks:
        for number, attention in attending.items():

            def before(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                inputs[number] = args, kwargs

            hooks.append(attention.register_forward_pre_hook(own_thread(before), with_kwargs=True))
        stock = model(input_ids=ids, use_cache=False).logits[0, -1]
    if missing := sorted(attending.keys() - calls.keys()):
        raise _refusal(
            model,
            "does not call transformers' attention function, so gracekv cannot read its keys and "
            "queries",
            missing[0],
        )
    if uneven := [x.layer for x in calls.values() if x.key.shape[-1] != x.value.shape[-1]]:
        raise _refusal(model, "has values of another dimension than its keys", uneven[0])
    rotations = {number: _rotation(model, calls[number], *inputs[number]) for number in inputs}
    if (difference := _difference(_last_step(model, ids, calls), stock)) > _tolerance(model):
        raise _refusal(
            model,
            f"differs by {difference:.1g} from the whole prompt at once in a step over cached "
            f"keys, values and states, so its attention is no softmax over its keys, or it keeps "
            f"more than them between steps",
        )
    remember_rotations(model, rotations)
    _passed.add(model)
    warnings.warn(
        f"The model family {family!r} is not tested with gracekv. A short random prompt gave what "
        f"the model itself gives, so it is used; compare some answers at ratio=1.",
        UntestedModelWarning,
        stacklevel=5,
    )


def _refusal(model: Any, problem: str, layer: int | None = None) -> UnsupportedModelError:
    place = "" if layer is None else f"Layer {layer} of "
    name, family = type(model).__name__, model.config.model_type
    return UnsupportedModelError(f"{place}{name} ({family}) {problem}.")


def _rotation(model: Any, call: AttentionCall, args: Any, kwargs: Any) -> Rotation:
    """The one that turns the plain keys of a layer into the rotated ones of its `call`."""
    pair, plain = kwargs.get("position_embeddings"), list[Tensor]()
    if pair is None and not has_rope(model):
        return "none"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise _refusal(
            model,
            "is not given cos and sin as `position_embeddings`, so its rotation is unknown",
            call.layer,
        )

    def catch(own: AttentionCall) -> Any:
        plain.append(own.key[0].float())
        raise _Enough

    cos, sin = pair
    still = kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    with patched_attention(model, catch), suppress(_Enough):
        call.module(*args, **still)
    places, differences = torch.arange(cos.shape[1]), dict[Rotation, float]()
    for rotation in ROTATIONS:
        rope = rope_of_table(cos[0].float(), sin[0].float(), rotation)
        if rope.cos.shape[1] <= plain[0].shape[-1]:
            differences[rotation] = _difference(rope.rotate(plain[0], places), call.key[0])
    best = min(differences, key=lambda rotation: differences[rotation])
    if differences[best] > _tolerance(model):
        raise _refusal(
            model, f"rotates its keys in a way other than {', '.join(ROTATIONS)}", call.layer
        )
    return best


def _last_step(model: Any, ids: Tensor, calls: Mapping[int, AttentionCall]) -> Tensor:
    """Logits [vocabulary] of the last token over what is cached of those before it."""
    from gracekv.prefill.stock_cache import StockLayers

    count, with_states = ids.shape[1], any(layer.has_states for layer in model_layers(model))
    # Sliding layers beside states have their window from the stock cache.
    by_hand = {x.number for x in (compressed_layers if with_states else model_layers)(model)}
    options: dict[str, Any] = {"use_cache": False}
    if with_states:
        others = StockLayers(model, (), 0)
        options = others.options()
        try:
            model(input_ids=ids[:, :-1], **options)
        except (AttributeError, TypeError, ValueError) as error:
            raise _refusal(
                model,
                f"does not run over the cache layers that transformers has for its kinds of "
                f"layers: {error}",
            ) from error
        others.read(1)

    def step(call: AttentionCall) -> Any:
        key, value, known = call.key, call.value, calls[call.layer]
        if call.layer in by_hand:
            key = torch.cat([known.key[:, :, :-1], key], dim=2)
            value = torch.cat([known.value[:, :, :-1], value], dim=2)
        return _softmax_attention(call.query, key, value, call).to(call.query.dtype), None

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
