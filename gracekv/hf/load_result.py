"""`load`: reads a file that `result.save` wrote."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan
from gracekv.backends import BACKENDS, Backend
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.cache.saved_states import AGAIN, refusing
from gracekv.cache.serialization import opened
from gracekv.cache.sharding import own_cache
from gracekv.distributed.agreement import in_step
from gracekv.errors import ConfigError, PromptError, SavedCacheError, ShapeError
from gracekv.files import path_of
from gracekv.hf.result import BatchResult, CompressionResult
from gracekv.pipeline import Pipeline
from gracekv.pipeline.run import Run
from gracekv.prefill.fingerprint import differences, fingerprint
from gracekv.prefill.layer_state import bytes_by_kind
from gracekv.prefill.model_layers import embeddings, head_sizes, input_device
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import PromptSpans
from gracekv.prefill.supported import check_model
from gracekv.registry import check_values
from gracekv.registry.plugins import missing_modules

# Facts of its model that every file has.
_MARKS = {"model_class", "config", "dtype", "adapters"}


def load(
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    backend: str | Backend | None = None,
) -> CompressionResult | BatchResult:
    """Read a file that `result.save(path)` wrote, and attach the model.

    The loaded result generates what the saved one did. The file holds no scores, so a limit never
    drops the loaded entries, and may then keep other tokens of an answer. If the model's heads are
    spread over processes, all of them must call this, and their number may differ from when it was
    saved. The file does not hold the results of the stages: `result.details` is None.

    Args:
        path: the file.
        model: the model that the cache was made with; its class, config, dtype and a sample of its
            weights are compared.
        tokenizer: for answers as text; its vocabulary and chat template are compared.
        backend: the attention backend for decoding; default: the saved pipeline's.

    Raises:
        SavedCacheError: the file is damaged, has an unknown format, belongs to another model or
            tokenizer, or its strategies come from a package that is not installed or imported here.
        UnsupportedModelError: see `attach`.
        ConfigError: `path` is not a path, or there is no such backend.
        CacheError: the KV heads cannot be divided among the model's processes.
        RankError: as for `gracekv.compress`.
    """
    path = path_of(path)
    check_model(model)
    with in_step(model) as shard, opened(path) as file:
        shard.agree(file=file.digest)
        header = file.header
        now = _checked_model(path, header, model, tokenizer)
        pipeline = _pipeline(path, header)
        packed, tensors = file.read(layer_devices(model))
        _, heads, dim = head_sizes(model)
        for number, layer in enumerate(packed.layers):
            if (layer.heads, layer.dim) != (heads, dim):
                raise SavedCacheError(
                    f"Layer {number} of {path} has {layer.heads} heads of {layer.dim} features, "
                    f"those of the model have {heads} of {dim}. {AGAIN}"
                )
        if backend is not None:
            pipeline = dataclasses.replace(pipeline, backend=BACKENDS.parse(backend))
        vocabulary = embeddings(model).num_embeddings
        with refusing(path, "whole prompts"):
            prompts, runs = _prompts(header, tensors, packed, tokenizer, now)
            for prompt, run in zip(prompts, runs, strict=True):
                _check_entries(prompt, run, vocabulary)
        if shard.ranks > 1:
            packed = own_cache(packed, shard)
        result = BatchResult if header["batch"] else CompressionResult
        return result.from_runs(model, prompts, runs, pipeline, packed=packed)


def layer_devices(model: Any) -> list[torch.device]:
    """The device on which each decoder layer computes."""
    fallback, devices = input_device(model), list[torch.device]()
    for layer in model.get_decoder().layers:
        # Weights that accelerate offloads are on "meta"; a hook has the device that computes.
        hooks = (getattr(part, "_hf_hook", None) for part in layer.modules())
        targets = (x for y in hooks if (x := getattr(y, "execution_device", None)) is not None)
        device = next(layer.parameters()).device
        devices.append(torch.device(next(targets, fallback)) if device.type == "meta" else device)
    return devices


def _checked_model(
    path: Path, header: Mapping[str, Any], model: Any, tokenizer: Any
) -> Mapping[str, str]:
    """The facts of file, model and tokenizer together; raises unless they agree."""
    saved, current = header.get("model"), fingerprint(model, tokenizer)
    if not isinstance(saved, dict) or _MARKS - saved.keys():
        raise SavedCacheError(
            f"The header of {path} does not name its model, weights and adapters, as in files of "
            f"earlier versions. {AGAIN}"
        )
    if other := differences(saved, current):
        raise SavedCacheError(
            f"{path} was saved from {saved['model_class']} {saved.get('model_name', '')!r}; its "
            f"{', '.join(other)} differ from those of the model or tokenizer given. Load it with "
            f"the same weights in the same dtype, and the tokenizer that made its ids."
        )
    # The file may have facts that are unknown here, such as a tokenizer's if none was given.
    return {**saved, **current}


def _prompts(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    packed: CompressedCache,
    tokenizer: Any,
    origin: Mapping[str, Any],
) -> tuple[list[Prompt], list[Run]]:
    """The prompts, whose lengths are checked against the entries, and their runs."""
    facts = header["prompts"]
    prompts = [saved_prompt(x, tensors[f"prompts.{n}.ids"], tokenizer) for n, x in enumerate(facts)]
    lengths = [packed.length - padding + 1 for padding in packed.padding]
    if [prompt.without_tail().spans.length for prompt in prompts] != lengths:
        raise PromptError(f"the parts of the prompts that were read do not have lengths {lengths}")
    if type(header["batch"]) is not bool or not (header["batch"] or len(prompts) == 1):
        raise ConfigError(f"batch is {header['batch']!r} for {len(prompts)} prompts")
    return prompts, [saved_run(fact, packed.sequence(n), origin) for n, fact in enumerate(facts)]


def _check_entries(prompt: Prompt, run: Run, vocabulary: int) -> None:
    """Raise `ShapeError` unless the accounting matches the entries and ids are in range."""
    spans, saved, packed = prompt.without_tail().spans, run.accounting, run.cache
    # Prefix and suffix, except the last token, which is fed again and has no entry.
    uncompressed = spans.length - 1 - spans.context_length
    other_bytes, widths = bytes_by_kind(packed.other_layers), WidthShare.of(packed)
    counted = saved.spent, saved.bytes, dict(saved.other_bytes), saved.widths
    real = int(saved.entries.sum()), packed.kv_bytes, other_bytes, widths
    # If the context ends the prompt, not every head need have kept its last token.
    ends = spans.context_end == spans.length
    if counted != real or not (ends or torch.equal(packed.entries() - uncompressed, saved.entries)):
        raise ShapeError("the accounting does not match the entries that the cache holds")
    if bool(((prompt.ids < 0) | (prompt.ids >= vocabulary)).any()):
        raise ShapeError(f"token ids are not from 0 to {vocabulary - 1}")


def _pipeline(path: Path, header: Mapping[str, Any]) -> Pipeline:
    try:
        return Pipeline.from_dict(header.get("pipeline"))  # type: ignore[arg-type]
    except (ConfigError, RecursionError) as error:
        # Modules that a file names are never imported: a file may come from anyone.
        missing = missing_modules(header.get("modules"))
        raise SavedCacheError(f"{path}'s pipeline cannot be made here.{missing} {error}") from error


def saved_prompt(facts: Mapping[str, Any], ids: Tensor, tokenizer: Any) -> Prompt:
    """The prompt that a file's `facts` describe, with its `ids` int64 [T].

    Raises `ConfigError` or another `ValueError` or `TypeError` if no result wrote them.
    """
    # Files of 0.2 have no "messages".
    written = dict(zip(("separator", "template", "messages", "day"), facts["format"], strict=False))
    check_values(Prompt, written)
    return Prompt(ids, _made_of(PromptSpans, facts["spans"]), None, tokenizer, **written)


def saved_run(facts: Mapping[str, Any], packed: CompressedCache, origin: Mapping[str, Any]) -> Run:
    """The run that a file's `facts` describe, with its entries and the model's fingerprint.

    Raises as `saved_prompt` does.
    """
    account = dict(facts["accounting"])
    if "kept_bytes" in account:  # its name in files of 0.2
        account["other_bytes"] = account.pop("kept_bytes")
    account["entries"] = torch.tensor(account["entries"])
    account["widths"] = tuple(_made_of(WidthShare, share) for share in account["widths"])
    accounting = _made_of(Accounting, account)
    timings = _made_of(Timings, facts["timings"])
    return Run(_made_of(BudgetPlan, facts["plan"]), packed, accounting, timings, origin)


def _made_of(cls: Any, data: Mapping[str, Any]) -> Any:
    check_values(cls, data)
    return cls(**data)
