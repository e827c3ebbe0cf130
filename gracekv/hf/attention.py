"""The attention function "gracekv", and switching a model to it and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gracekv.backends import AttentionStep
from gracekv.errors import CacheError
from gracekv.hf.input_checks import before_forward, before_masks
from gracekv.hf.layer import PackedStates
from gracekv.hf.static_layer import tail_is_full
from gracekv.prefill.attention_patch import ATTACHED, base_attention, model_lock, own_eager
from gracekv.prefill.model_layers import own_decoder
from gracekv.prefill.partial_attention import additive
from gracekv.prefill.supported import check_decoder, check_model
from gracekv.undo import undone, without_autocast

_attached: WeakSet[Any] = WeakSet()
# The active blocks of `attached` in all threads; the last one to end detaches the model.
_blocks: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()


def attach(model: Any) -> None:
    """Enable the model to read compressed caches; its other behaviour does not change.

    Makes gracekv's attention the model's implementation, and hooks the decoder's forward to check
    inputs passed with a compressed cache (see `gracekv.hf.input_checks`); a second call has no
    effect. Undo with `detach`.

    Raises `UnsupportedModelError` if the model's family is not tested and fails a check, it is in
    training mode, or its attention is neither "sdpa" nor "eager".
    """
    check_model(model)
    set_attention(model)


def set_attention(model: Any) -> None:
    """As `attach`, for a model that has passed `check_model`."""
    decoder = own_decoder(model)
    with model_lock(model):
        name = next(name for name, base in ATTACHED.items() if base == base_attention(model))
        if decoder.config._attn_implementation != name:
            decoder.config._attn_implementation = name
        _attached.add(model)
        if not _hooks(model):
            model.get_decoder().register_forward_pre_hook(before_forward, with_kwargs=True)
            if model.base_model is not model.get_decoder():
                model.register_forward_pre_hook(before_masks, with_kwargs=True)


def detach(model: Any) -> None:
    """Restore the attention that the model had before `attach`; no effect if not attached.

    If another attached model shares the config, both keep gracekv's attention, which equals sdpa
    without a compressed cache.
    """
    check_decoder(model)
    own = own_decoder(model)
    with model_lock(model):
        # A deep copy of an attached model also has copies of its hooks.
        for module, key in _hooks(model):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        shared = any(x.config is own.config for x in map(own_decoder, _attached) if x is not own)
        if own.config._attn_implementation in ATTACHED and not shared:
            own.config._attn_implementation = base_attention(model)
        # Last, so that an interrupted call can be repeated.
        _attached.discard(model)


def _hooks(model: Any) -> list[tuple[Any, int]]:
    """Modules and keys of the input-check hooks, whatever the model's config says."""
    hooks = ((x, x._forward_pre_hooks) for x in (model.get_decoder(), model))
    checks = (before_forward, before_masks)
    return [(x, key) for x, own in hooks for key, hook in own.items() if hook in checks]


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """Attach the model for the duration of a `with` block; afterwards it is as before.

        with gracekv.attached(model):
            result = gracekv.compress(model, prompt, ratio=8)
            answer = result.generate()

    Raises what `attach` raises.
    """
    # Check first: `undo` detaches, which only models can be.
    check_model(model)
    mine = object()

    def undo() -> None:
        with model_lock(model):
            blocks = _blocks.get(model, set())
            blocks.discard(mine)
            if not blocks:
                detach(model)

    with model_lock(model):
        name = own_decoder(model).config._attn_implementation
        stays = name in ATTACHED and bool(_hooks(model)) and not _blocks.get(model)
    with nullcontext() if stays else undone(undo):
        with model_lock(model):
            if not stays:
                _blocks.setdefault(model, set()).add(mine)
            set_attention(model)
        yield


def attention(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor | PackedStates,
    value: Tensor | PackedStates,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, Tq, H, d] attention over a compressed cache, or for plain tensors that of `base`.

    Raises `CacheError` if cache and inputs do not fit together.
    """
    if not isinstance(key, PackedStates):
        # sdpa supports neither softcaps nor sinks.
        special = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
        plain = _eager
        if not special and base == "sdpa":
            # Users may have registered a function of their own under this name.
            plain = ALL_ATTENTION_FUNCTIONS.get_interface(base, _eager)
        kwargs |= {"scaling": scaling, "dropout": dropout}
        return plain(module, query, key, value, attention_mask, **kwargs)
    if dropout:
        raise CacheError("A compressed cache is for inference. Call model.eval() first.")
    if kwargs.get("output_attentions"):
        raise CacheError(
            "Attention weights over a compressed cache are not those of the prompt's tokens. Use "
            "output_attentions=True without past_key_values."
        )
    layer, packed, places = key.layer, key.layer.packed, key.keys.shape[2]
    window, length = kwargs.get("sliding_window"), packed.length + places
    eager = not torch.compiler.is_compiling()
    # A static tail may have more places than tokens.
    if window and length > window and eager and (length := int(layer.logical_length)) > window:
        # A sliding layer's cache was compressed as if the layer saw everything.
        raise CacheError(
            f"The sequence has grown to {length} tokens, past the model's sliding window of "
            f"{window}, so the compressed cache no longer fits. Generate fewer tokens, or use a "
            f"model with full attention in every layer."
        )
    if attention_mask is not None and attention_mask.shape[-1] != places:
        raise CacheError(
            f"A prepared attention mask must cover the {places} tokens since compression; it "
            f"covers {attention_mask.shape[-1]}. Pass a 2D mask over all tokens, or none."
        )
    step = AttentionStep(
        # Under autocast, rotated queries are float32; values and entries have the products' dtype.
        query.to(key.keys.dtype),
        packed.prepared,
        key.keys,
        key.values,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=attention_mask,
        length=layer.length if attention_mask is None else None,
        rows=layer.rows,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
    )
    layer.record(step)
    # The tail has no gradients either, and autograd could not save entries made in inference mode.
    with without_autocast(), torch.no_grad():
        return packed.backend(step).transpose(1, 2).contiguous(), None


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Any, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, with sdpa's masks."""
    count, length = query.shape[2], key.shape[2]
    if mask is None and count > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - count)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = additive(~mask, query, "eager")
    output: tuple[Tensor, Tensor] = own_eager(module)(module, query, key, value, mask, **kwargs)
    return output


def tail_mask(
    base: str,
    *,
    q_length: int | Tensor = 0,
    kv_length: int,
    kv_offset: int = 0,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Stock sdpa mask [B, 1, Tq, S] of the tail, or None if each token sees all before it.

    Raises `CacheError` if a 2D `attention_mask` [B, length] does not fit the cache.
    """
    if kv_offset and isinstance(q_offset, Tensor):
        needed = 0 if attention_mask is None else attention_mask.shape[-1] - int(kv_offset)
        recording = q_offset.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (recording or torch.compiler.is_compiling()):
            # A GPU crashes the process if a place does not exist, and `generate` has no mask.
            offset, new = int(q_offset), int(q_length)
            # The cached tokens of a whole sequence are removed later.
            needed = 0 if new > offset else offset + new - int(kv_offset)
        if needed > kv_length:
            raise CacheError(tail_is_full(needed, int(kv_length)))
    if kv_offset and attention_mask is None and q_length == 1:
        # transformers 5.17 would make a mask during CUDA graph capture.
        return None
    if base == "eager" and not kv_offset:
        kwargs["allow_is_causal_skip"] = False
    kwargs |= {"kv_length": kv_length, "kv_offset": kv_offset, "q_offset": q_offset}
    mask: Tensor | None = sdpa_mask(q_length=q_length, attention_mask=attention_mask, **kwargs)
    return mask


for _name, _base in ATTACHED.items():
    AttentionInterface.register(_name, partial(attention, _base))
    # Without a mask function of the same name, attention would silently get no mask at all.
    AttentionMaskInterface.register(_name, partial(tail_mask, _base))
