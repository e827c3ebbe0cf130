"""Contexts with as many entries in every head, which vLLM's pages can hold before the question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache
from gracekv.errors import StoreError
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.stored_context import StoredContext

PLACEHOLDER = 0
"""The token that stands in a prompt where a context's entries are loaded; it is never computed."""


def equal_share(cache: RaggedCache) -> int | None:
    """Entries of each head, if all hold as many and each stands for one token; else None."""
    lengths = cache.entries()
    original = all(not bool(layer.log_multiplicity.any()) for layer in cache.layers)
    return int(lengths[0, 0]) if original and bool((lengths == lengths[0, 0]).all()) else None


def check_prompt(header: ContextHeader, name: str, ids: Sequence[int], params: Any) -> None:
    """Raise `StoreError` unless vLLM can load the context before the question.

    Args:
        header: of a context with equal shares.
        name: of the context.
        ids: the request's prompt.
        params: vLLM's sampling parameters of the request.
    """
    share = header.share
    if len(ids) <= share or any(i != PLACEHOLDER for i in ids[:share]):
        raise StoreError(
            f"Context {name!r} is loaded in the place of the prompt's first {share} tokens, so the "
            f"prompt is {share} times the token {PLACEHOLDER}, then the question's tokens, as "
            f"gracekv.vllm.request makes it; got {len(ids)} tokens that begin otherwise."
        )
    if getattr(params, "skip_reading_prefix_cache", False):
        raise StoreError(
            f"Context {name!r} is loaded, not computed, so its prompt has no log-probabilities. "
            f"Ask without prompt_logprobs and skip_reading_prefix_cache."
        )


def write_entries(
    context: StoredContext, first: int, blocks: Sequence[int], size: int, layers: Mapping[int, Any]
) -> None:
    """Write entries `first` and all after it into pages, as each layer's attention writes its own.

    Args:
        context: with equal shares.
        first: of the entries, counted in each head; those before are in the pages already.
        blocks: numbers of the request's pages.
        size: tokens of a page.
        layers: vLLM's attention layers by the model's layer.
    """
    places = torch.arange(first, context.header.share)
    slots = torch.tensor(blocks)[places // size] * size + places % size
    for number, entries in enumerate(context.layers):
        layer = layers[number]
        keys, values = (
            _by_token(x, entries.heads, first).to(layer.kv_cache.device)
            for x in (entries.keys, entries.values)
        )
        layer.impl.do_kv_cache_update(
            layer, keys, values, layer.kv_cache, slots.to(layer.kv_cache.device)
        )


def _by_token(packed: Tensor, heads: int, first: int) -> Tensor:
    """[n, G, d] contiguous, of [G * share, d] in which each head's entries lie together."""
    return packed.view(heads, -1, packed.shape[-1])[:, first:].transpose(0, 1).contiguous()
