"""Checks and completes the inputs of a model that runs over a compressed cache.

A forward pre-hook on the decoder sees mask and positions as the caller passed them; the attention
function only sees what transformers made of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gracekv.errors import CacheError
from gracekv.hf.cache import GraceCache
from gracekv.prefill.cache_keyword import given_cache
from gracekv.prefill.length_limits import dynamic_limit, switch_point

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs | None:
    """Make the decoder's inputs fit the `GraceCache` passed with them; other inputs are unchanged.

    - Tokens that are cached already are removed. Assisted decoding and prompt lookup pass the whole
      sequence in their first step; its mask is then as long as the ids, or its positions start at
      0.
    - States are repeated for samples and beams.
    - A batch of prompts of different lengths gets mask and positions if it has none.

    Compiled steps over a static tail are not checked.

    Raises `CacheError` if hidden states of cached tokens are requested in such a first step; if the
    mask hides cached tokens or does not hide a batch's padding; if positions do not follow the
    cached tokens, pass the point where the model's RoPE changes, or are missing with a batch's
    prepared mask; or if the model is in training mode.
    """
    cache = given_cache(kwargs)
    if not isinstance(cache, GraceCache):
        return None
    if module.training:
        raise CacheError(
            f"The {type(module).__name__} is in training mode, and a compressed cache is for "
            f"inference. Call model.eval() first."
        )
    if cache.is_replayed or (torch.compiler.is_compiling() and cache.is_compileable):
        return None
    return _prepare(module, cache, args, kwargs)  # type: ignore[no-any-return]


def before_masks(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the 2D mask of a model that makes the decoder's masks before it calls the decoder.

    Raises `CacheError` if the mask hides cached tokens, does not hide a batch's padding, or does
    not have the length of cached and new tokens together.
    """
    cache, mask = given_cache(kwargs), kwargs.get("attention_mask")
    if not (isinstance(cache, GraceCache) and isinstance(mask, Tensor) and mask.ndim == 2):
        return
    if not (cache.is_replayed or torch.compiler.is_compiling()):
        known = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        new, cached = next(x.shape[1] for x in known if x is not None), int(cache.get_seq_length())
        check_positions(mask.shape[1], new if mask.shape[1] == new > cached else cached + new)
        _check_hidden(mask, cache.packed_mask(len(mask), mask.device))


# Dynamo would treat numbers that change with every step as constants.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare(module: Any, cache: GraceCache, args: Any, kwargs: dict[str, Any]) -> _Inputs | None:
    name = "input_ids" if kwargs.get("inputs_embeds") is None else "inputs_embeds"
    kwargs = dict(kwargs)
    if args:
        kwargs[name], args = args[0], args[1:]
    if args or kwargs.get(name) is None:
        return None
    cached = int(cache.get_seq_length())
    _remove_cached(kwargs, name, cached, compiles=cache.is_compileable)
    rows, new = kwargs[name].shape[:2]
    _check_length(module, cache, cached + new)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    flat, hides_nothing = _flat(mask), _hides_nothing(mask)
    if flat is not None:
        check_positions(flat.shape[1], cached + new)
    elif hides_nothing and positions is not None and not any(cache.padding):
        # `generate` drops a mask of ones, so only positions distinguish used and fresh caches.
        check_positions(int(positions.max()) + 1, cached + new)
    cache.fit_rows(rows)
    cache.make_room(kwargs[name], None if hides_nothing else mask)
    if any(cache.padding):
        visible = cache.packed_mask(rows, kwargs[name].device)
        _fit_padding(cache, kwargs, visible, new, cached + new)
    elif flat is not None:
        _check_hidden(flat, flat.new_ones(1, cache.packed_length, dtype=torch.bool))
        if positions is not None and new == 1 and flat.shape[1] == cached + 1:
            # One token may be the padding of a shorter row.
            last, real = flat.long().sum(dim=-1) - 1, flat[:, -1].bool()
            _check_last(positions, last.expand(rows), real.expand(rows))
    return (), kwargs


def _remove_cached(kwargs: dict[str, Any], name: str, cached: int, *, compiles: bool) -> None:
    """Remove the cached tokens from the inputs if these are the sequence from its start."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    flat, count = _flat(mask), kwargs[name].shape[1]
    if count <= cached or not _is_whole(flat, positions, count):
        return
    if kwargs.get("output_hidden_states"):
        raise CacheError(
            "A compressed prompt has no hidden states. Leave output_hidden_states out. To draft, "
            "use prompt lookup or an assistant that does not read hidden states (use_mtp, dflash "
            "and Gemma 4's assistants do)."
        )
    kwargs[name] = kwargs[name][:, cached:]
    if isinstance(mask, dict) or (flat is None and compiles):
        # `generate` made it for the whole sequence, a prompt without padding; it is remade.
        kwargs["attention_mask"] = None
    if positions is not None:
        kwargs["position_ids"] = positions[..., cached - count :]


def _check_length(module: Any, cache: GraceCache, length: int) -> None:
    """Raise `CacheError` if the model rotates keys differently at a `length` of all tokens."""
    switch = switch_point(module)
    if switch and cache.packed_length - max(cache.padding) < switch < length:
        raise CacheError(
            f"The sequence has grown to {length} tokens, past {switch}, where the model's RoPE "
            f"changes. Generate fewer tokens, or use a longer prompt."
        )
    limit = dynamic_limit(module) if any(cache.padding) else None
    if limit and length > limit:
        raise CacheError(
            f"The longest row has {length} tokens, and beyond {limit} the model rotates all rows "
            f"by it (dynamic RoPE). Continue each prompt alone: batch[0].new_cache()."
        )


def _fit_padding(cache: GraceCache, kwargs: Any, visible: Tensor, new: int, length: int) -> None:
    """Add mask and positions of a padded batch, or check those that were given.

    `visible` bool [rows, packed] is False for padding; `length` counts cached and new tokens.
    """
    rows, mask, positions = len(visible), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None:
        mask = visible.new_ones(rows, length)
        mask[:, : visible.shape[1]] = visible
        kwargs["attention_mask"] = mask
    elif _flat(mask) is not None:
        _check_hidden(mask, visible)
    elif positions is None:
        raise CacheError("A prepared mask of a batch needs position_ids. Pass a 2D mask, or none.")
    else:
        # It may also hide tokens since compression, so this is an upper bound of a row's position.
        highest = length - 1 - cache.packed_padding(rows, positions.device)
        last = _last(positions)
        _check_last(positions, torch.where(last > highest, highest, last))
        return
    expected = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -new:]
    if positions is None:
        kwargs["position_ids"] = expected
    else:
        _check_last(positions, expected[:, -1], mask[:, -1].bool())


def check_positions(length: int, covered: int) -> None:
    """Raise `CacheError` unless mask or positions cover as many tokens as the cache.

    Both numbers count all tokens, including those of this step.
    """
    if length != covered:
        raise CacheError(
            f"The model was given tokens up to position {length - 1}, but with them the cache "
            f"covers {covered}. Pass the whole sequence, of which all but the new tokens are "
            f"cached, and a fresh cache (result.new_cache()) to start again."
        )


def _check_last(positions: Tensor, expected: Tensor, real: Tensor | None = None) -> None:
    """Raise `CacheError` unless the last of `positions` [.., B, n] are `expected`, int64 [B].

    Rows whose last token is padding (`real` bool [B] is False) are not checked.
    """
    last = _last(positions)
    expected = expected.to(last.device)
    if real is not None:
        expected = torch.where(real.to(last.device), expected, last)
    if not torch.equal(last.expand(len(expected)), expected):
        raise CacheError(
            f"The rows of a batch continue from the lengths of their own prompts, at positions "
            f"{expected.tolist()}; the model was given {last.tolist()}. Leave position_ids out."
        )


def _last(positions: Tensor) -> Tensor:
    """int64 [B]: the last of `positions` [.., B, n] in each row."""
    # Models that read images also number rows and columns; for text, all agree.
    return positions.reshape(-1, *positions.shape[-2:])[0][..., -1]


def _is_whole(mask: Tensor | None, positions: Tensor | None, count: int) -> bool:
    """Whether the `count` tokens are the sequence from its start, including cached tokens."""
    if mask is not None:
        return mask.shape[1] == count
    if positions is None or positions.shape[-1] != count:
        return False
    return int(positions[..., 0].max()) == 0


def _flat(mask: Any) -> Tensor | None:
    """The mask if it is 2D, over all tokens, else None."""
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _hides_nothing(mask: Any) -> bool:
    """Whether the last token sees all. Some models turn None into a dict of bool masks or None."""
    full = mask.get("full_attention") if isinstance(mask, dict) else mask
    return full is None or (isinstance(mask, dict) and bool(full[..., -1, :].all()))


def _check_hidden(mask: Tensor, visible: Tensor) -> None:
    """Raise `CacheError` unless the 2D `mask` covers the packed tokens as `visible` does.

    `visible` is bool [B or 1, packed]: False where a row is padded.
    """
    covered, visible = mask[:, : visible.shape[1]].bool(), visible.to(mask.device)
    if bool((covered == visible).all()):
        return
    if bool((covered & ~visible).any()):
        raise CacheError(
            "The prompts of this batch have different lengths, and the attention mask does not "
            "hide the padding on their left. Use result.inputs, or leave the mask out."
        )
    raise CacheError(
        "The attention mask hides tokens of the compressed prompt; their entries are merged and "
        "cannot be hidden. Compress without padding; for a batch use result.inputs."
    )
