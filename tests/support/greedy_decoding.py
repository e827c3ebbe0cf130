"""Greedy generation over stock and compressed caches, with the logits behind each choice."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache
from gracekv.hf import GraceCache, attach, detach


def greedy(
    model: Any, ids: Tensor, cache: GraceCache | None = None, tokens: int = 16
) -> tuple[Tensor, Tensor]:
    """New ids [n] and the logits [n, vocabulary] behind them; the stock model without a cache."""
    (detach if cache is None else attach)(model)
    new, logits = with_logits(model, ids[None], torch.ones_like(ids)[None], cache, tokens)
    return new[0], logits[:, 0]


def with_logits(
    model: Any, ids: Tensor, mask: Tensor, cache: Any, tokens: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """New ids [rows, n] and the logits [n, rows, vocabulary] of each step, greedy by default."""
    told = {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    options = {"max_new_tokens": tokens, "do_sample": False, **told, **options}
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits)


def plain_answer(model: Any, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    """New ids [rows, n] of `model.generate` after ids [T], greedy by default."""
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **options}
    mask = torch.ones_like(ids)[None]
    return model.generate(ids[None], attention_mask=mask, **options)[:, len(ids) :]


def heavier(cache: RaggedCache) -> RaggedCache:
    """The same entries with multiplicities that matter, as tiny models attend to few tokens."""
    rng = torch.Generator().manual_seed(1)
    layers = [
        dataclasses.replace(layer, log_multiplicity=torch.rand(layer.entries, generator=rng) * 5)
        for layer in cache.layers
    ]
    return dataclasses.replace(cache, layers=tuple(layers))
