"""Checks a model of an untested family on a short random prompt.

Compression assumes the attention of most models: softmax(s q.k + mask) v, with a softcap or sinks
if the model has them, over cached keys that are rotated by RoPE in one of a few ways, or not at
all. Both are computed here from the arguments that a model's attention modules pass to
transformers' attention function, and compared with the model's own results. Source: ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError, UntestedModelWarning
from gracekv.kernels.linalg import capped, softmax
from gracekv.prefill.attention_patch import AttentionCall, Enough, own_thread, patched_attention
from gracekv.prefill.model_layers import (
    CHECKED,
    ROTATIONS,
    Rotation,
    attention_module,
    cache_dtype,
    compressed_layers,
    embeddings,
    has_rope,
    input_device,
    model_layers,
    output_projection,
    rope_of_table,
    rotation_table,
)
from gracekv.undo import hooked

_TOKENS = 24
# The largest relative difference that is rounding, by bytes per number.
_TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 0.1}


@torch.no_grad()
def self_check(model: Any) -> None:
    """Check `model` once: its rotations, and a step over cached keys, values and states.

    Warns (`UntestedModelWarning`) if all are as expected. Raises `UnsupportedModelError` with the
    first layer, or other part, that differs.
    """
    if model in CHECKED:
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
    ids = torch.arange(1, _TOKENS + 1) * 7919 % embeddings(model).num_embeddings
    ids = ids[None].to(input_device(model))
    calls: dict[int, AttentionCall] = {}
    inputs: dict[int, tuple[Any, Any]] = {}

    def attend(call: AttentionCall) -> Any:
        if call.layer in calls:
            raise _refusal(model, "runs more than once, each time with other keys", call.layer)
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
        raise _refusal(model, "has values and keys of different dimensions", uneven[0])
    rotations = {number: _rotation(model, calls[number], *inputs[number]) for number in inputs}
    compressed = [layer.number for layer in compressed_layers(model)]
    if len({(calls[n].query.shape, calls[n].key.shape) for n in compressed}) > 1:
        raise _refusal(model, "has compressed layers of several sizes")
    if turned := [n for n in compressed if rotations[n] != "none"]:
        pairs = {number: inputs[number][1]["position_embeddings"] for number in turned}
        table = rotation_table(model, pairs[turned[0]][0], torch.arange(_TOKENS)[None].to(ids))
        for number, pair in pairs.items():
            if any(_difference(x.to(y), y) > 1e-6 for x, y in zip(pair, table, strict=True)):
                raise _refusal(model, "does not rotate by the same angles as other layers", number)
    if (difference := _difference(_by_steps(model, ids, calls), stock)) > _tolerance(model):
        raise _refusal(
            model,
            f"differs by {difference:.1g} from a single pass when run in steps over cached "
            f"keys, values and states: its attention is not a softmax over its keys, it keeps more "
            f"than them between steps, or its states start anew with several tokens",
        )
    CHECKED[model] = rotations
    warnings.warn(
        f"{type(model).__name__} of family {family!r} is not tested with gracekv. A short random "
        f"prompt gave the model's own results, so it is used; compare some answers at ratio=1.",
        UntestedModelWarning,
        stacklevel=5,
    )


def _refusal(model: Any, problem: str, layer: int | None = None) -> UnsupportedModelError:
    place = "" if layer is None else f"Layer {layer} of "
    name, family = type(model).__name__, model.config.model_type
    return UnsupportedModelError(f"{place}{name} ({family}) {problem}.")


def _rotation(model: Any, call: AttentionCall, args: Any, kwargs: Any) -> Rotation:
    """The rotation that turns the unrotated keys of a layer into those of its `call`."""
    pair, plain = kwargs.get("position_embeddings"), list[Tensor]()
    if pair is None and not has_rope(model):
        return "none"
    if not isinstance(pair, tuple) or len(pair) != 2:
        problem = "gets no cos and sin as `position_embeddings`, so its rotation is unknown"
        raise _refusal(model, problem, call.layer)

    def catch(own: AttentionCall) -> Any:
        plain.append(own.key[0].float())
        raise Enough

    cos, sin = pair
    still = kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    with patched_attention(model, catch):
        call.module(*args, **still)
    places, differences = torch.arange(cos.shape[1]), dict[Rotation, float]()
    for rotation in ROTATIONS:
        rope = rope_of_table(cos[0].float(), sin[0].float(), rotation)
        if rope.cos.shape[1] <= plain[0].shape[-1]:
            differences[rotation] = _difference(rope.rotate(plain[0], places), call.key[0])
    best = min(differences, key=lambda rotation: differences[rotation])
    if differences[best] > _tolerance(model):
        problem = f"rotates its keys in a way other than {', '.join(ROTATIONS)}"
        raise _refusal(model, problem, call.layer)
    return best


def _by_steps(model: Any, ids: Tensor, calls: Mapping[int, AttentionCall]) -> Tensor:
    """Logits [vocabulary] of the last token over the cache of the tokens before it.

    If layers have states, the tokens before it are read in two steps.
    """
    from gracekv.prefill.stock_cache import StockLayers

    count, with_states = ids.shape[1], any(layer.has_states for layer in model_layers(model))
    # In models with states, the stock cache handles the window of sliding layers.
    by_hand = {x.number for x in (compressed_layers if with_states else model_layers)(model)}
    stock, length = StockLayers(model, (), 0), 0
    options: dict[str, Any] = stock.options() if with_states else {"use_cache": False}

    def step(call: AttentionCall) -> Any:
        key, value, recorded = call.key, call.value, calls[call.layer]
        if call.layer in by_hand:
            key = torch.cat([recorded.key[:, :, :length], key], dim=2)
            value = torch.cat([recorded.value[:, :, :length], value], dim=2)
        return _softmax_attention(call.query, key, value, call).to(call.query.dtype), None

    def run(end: int) -> Any:
        place = torch.arange(length, end, device=ids.device)[None]
        return model(input_ids=ids[:, length:end], position_ids=place, **options)

    with patched_attention(model, step):
        for end in (count // 2, count - 1) if with_states else ():
            try:
                run(end)
            except (AttributeError, TypeError, ValueError) as error:
                raise _refusal(
                    model,
                    f"does not run with transformers' cache layers for its kinds of "
                    f"layers: {error}",
                ) from error
            stock.read(count - end)
            length = end
        length = count - 1
        logits: Tensor = run(count).logits[0, -1]
    return logits


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """float32 [B, Q, H, d]; the queries are the last of the keys' tokens."""
    args, window = call.softmax_args, call.options.get("sliding_window")
    group, count, length = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    logits = capped(args["scale"] * query.float() @ key.mT, args["softcap"])
    hidden = torch.ones(count, length, dtype=torch.bool, device=key.device)
    hidden = hidden.triu(length - count + 1) | hidden.tril(length - count - (window or length))
    sinks = None if args["sinks"] is None else args["sinks"][:, None, None]
    shares = softmax(logits.masked_fill_(hidden, -torch.inf), sinks)
    return (shares @ value).transpose(1, 2)


def _difference(logits: Tensor, target: Tensor) -> float:
    """|logits - target| / |target|."""
    target = target.float()
    return float((logits.float() - target).norm() / target.norm().clamp_min(1e-30))


def _tolerance(model: Any) -> float:
    return _TOLERANCE[cache_dtype(model).itemsize]
