"""`export`: a compressed prompt as a folder that vLLM can serve."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv import recipes
from gracekv.cache.base import RaggedCache
from gracekv.cache.quantised import dequantised
from gracekv.distributed.sharding import check_whole
from gracekv.errors import UnsupportedModelError
from gracekv.files import VERSION
from gracekv.hf.base_result import BaseResult
from gracekv.kernels.rope import Rope
from gracekv.prefill.fingerprint import active_adapters, check_same_model, tokenizer_marks
from gracekv.prefill.model_layers import (
    model_layers,
    other_layers,
    rope_of_table,
    rope_parameters,
)
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import sliding_window, switch_point, trained_length
from gracekv.vllm.context_folder import check_replaceable, write_context
from gracekv.vllm.documents import question_text
from gracekv.vllm.header import ContextHeader, check_name
from gracekv.vllm.model_facts import model_facts
from gracekv.vllm.orders import Follow


def export(result: BaseResult, path: str | os.PathLike[str]) -> Path | list[Path]:
    """Write the compressed prompt as a folder that vLLM serves by its name; see docs/vllm.md.

        gracekv.vllm.export(result, "store/book")

    There is the new context or what was there before, also if the process is killed. A folder of
    that name is replaced if it holds a context's files and nothing else. A batch writes book-1,
    book-2, ...

    Args:
        result: what `compress` or `load` returned.
        path: the store's folder and the context's name in it.

    Returns:
        The folder; a list of them for a batch.

    Raises:
        StoreError: `check_name` refuses the name, or a folder of that name holds other files.
        UnsupportedModelError: the model's heads are spread over processes; or vLLM would not see
            the entries as this model does: RoPE that depends on the sequence's length, or layers
            with a sliding window.
        CacheError: the model's weights or adapters are not those that made the entries.
    """
    check_whole(result.model, "export")
    check_served(result.model)
    check_same_model(
        result.fingerprint, result.model, "What is to be exported", "Compress it with this model."
    )
    path = Path(path)
    count = len(result.prompts)
    names = [f"{path.name}-{number}" for number in range(1, count + 1)] if result.is_batch else None
    folders = [path.parent / check_name(name) for name in names or [path.name]]
    for folder in folders:
        check_replaceable(folder)
    # vLLM computes with numbers in the model's dtype.
    caches = [dequantised(result.packed.sequence(number)) for number in range(count)]
    model, recipe = result.model, recipes.label(result.pipeline)
    for cache, prompt, folder in zip(caches, result.prompts, folders, strict=True):
        header = functools.partial(describe, model, _follow(prompt, cache), cache, recipe)
        write_context(moved(model, cache), header, folder)
    return folders if result.is_batch else folders[0]


def check_served(model: Any) -> None:
    """Raise `UnsupportedModelError` if vLLM would not see the entries as this model does."""
    name, others = type(model).__name__, other_layers(model)
    if others:
        raise UnsupportedModelError(
            f"Layer {others[0].number} of {name} is of kind {others[0].kind}; a context for vLLM "
            f"holds entries of layers with full attention only. Serve a model that has no others."
        )
    adapters = active_adapters(model)
    if adapters:
        raise UnsupportedModelError(
            f"{name} computes with the adapters {', '.join(adapters)}, which contexts are not "
            f"served with. Merge them into the weights, and serve those."
        )
    if "mrope_section" in rope_parameters(model):
        raise UnsupportedModelError(
            f"{name} also numbers rows and columns of images, and vLLM is not tested with contexts "
            f"of such models. Serve a model that reads text only."
        )
    rope = rope_parameters(model)["rope_type"]
    if rope in ("dynamic", "longrope") or switch_point(model) is not None:
        raise UnsupportedModelError(
            f"{name} rotates keys by how long the whole sequence is (RoPE {rope!r}), and vLLM sees "
            f"the question and its answer only. Serve a model whose rotation depends on positions "
            f"alone: default, linear, llama3 or yarn. Every recipe works with them."
        )
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap is not None:
        raise UnsupportedModelError(
            f"{name} caps its attention logits at {cap}, which attention beside vLLM's pages does "
            f"not. Serve a model without a cap; every recipe works with it."
        )
    window = sliding_window(model)
    if window is not None:
        raise UnsupportedModelError(
            f"{name} has layers with a sliding window of {window} tokens, which vLLM would count "
            f"from the question on. Serve a model with full attention in every layer; every recipe "
            f"works with it."
        )


def _follow(prompt: Prompt, cache: RaggedCache) -> Follow:
    """How requests go on after `prompt`, of which `cache` was made."""
    spans, tokenizer = prompt.spans, prompt.tokenizer
    end = spans.length if prompt.has_question else spans.context_end
    text = None
    if tokenizer is not None and not prompt.has_question:
        text = question_text(tokenizer, prompt.separator, prompt.template)
    return Follow(
        tokenizer={} if tokenizer is None else tokenizer_marks(tokenizer),
        question_text=text,
        separator=prompt.separator,
        template=prompt.template,
        has_question=prompt.has_question,
        prompt_ids=tuple(prompt.ids[cache.length : end].tolist()),
    )


def describe(
    model: Any, follow: Follow, cache: RaggedCache, recipe: str, digest: str
) -> ContextHeader:
    """The header of a context.

    Args:
        model: made it.
        follow: how requests go on after it.
        cache: its entries.
        recipe: the pipeline's name.
        digest: of the entries' file, or what stands for it.
    """
    goes_on = asdict(follow)
    del goes_on["start"]
    return ContextHeader(
        length=cache.length,
        entries=int(cache.entries().sum()),
        bytes=cache.kv_bytes,
        digest=digest,
        dtype=str(model.dtype).removeprefix("torch."),
        model=model_facts(model),
        recipe=recipe,
        positions=trained_length(model),
        gracekv_version=VERSION,
        **goes_on,
    )


def moved(model: Any, cache: RaggedCache) -> RaggedCache:
    r"""The entries with their positions moved so that the next token has position 0, T before.

    R(p) k becomes R(p - T) k = R(-T) R(p) k, in float32: attention only sees differences of
    positions. `positions` stay those of the prompt.

    Source: Eq. (T1).
    """
    turns = _rotations(model, cache.length)
    layers = (
        replace(layer, keys=_turned(layer.keys, turn))
        for layer, turn in zip(cache.layers, turns, strict=True)
    )
    return RaggedCache(tuple(layers), cache.length)


def _turned(keys: Tensor, turn: Rope) -> Tensor:
    start = torch.zeros(1, dtype=torch.int64)
    return turn.unrotate(keys.float(), start).to(keys.dtype)


def _rotations(model: Any, position: int) -> list[Rope]:
    """R(position) of each layer, without the factor that yarn-like schemes multiply into it."""
    device = next(model.get_decoder().rotary_emb.buffers()).device
    at = torch.tensor([[position]], device=device)
    with torch.inference_mode():
        cos, sin = model.get_decoder().rotary_emb(torch.zeros(1, device=device), at)
    cos, sin = cos[0].float().cpu(), sin[0].float().cpu()
    norm = (cos * cos + sin * sin).sqrt()
    cos, sin = cos / norm, sin / norm
    return [rope_of_table(cos, sin, layer.rotation) for layer in model_layers(model)]
