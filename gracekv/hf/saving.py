"""Compression results as files: what was kept, of which prompt, by which model."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracekv.allocate.budget import BudgetPlan
from gracekv.backends import BACKENDS, Backend
from gracekv.cache import Accounting, Timings
from gracekv.cache.base import RaggedCache
from gracekv.cache.serialization import read_cache, read_header, write_cache
from gracekv.errors import SavedCacheError
from gracekv.prefill.capture import input_device
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import PromptSpans

if TYPE_CHECKING:
    from gracekv.hf.batch import BatchResult
    from gracekv.hf.result import CompressionResult
    from gracekv.pipeline import Pipeline, Run

# Elements of each weight that identify it, evenly spread: hashing all of them would read the whole
# model. Source: ours.
_SAMPLES = 64
# Where the model came from may differ between machines; its computation may not.
_INFORMATIVE = ("model_name",)


def save_result(
    path: str | os.PathLike[str],
    model: Any,
    prompts: Sequence[Prompt],
    runs: Sequence[Run],
    cache: RaggedCache,
    pipeline: Pipeline,
    *,
    batch: bool,
) -> None:
    """Write what `load` needs to go on in another process, atomically; see `CompressionResult`."""
    from gracekv import __version__

    header = {
        "gracekv_version": __version__,
        "batch": batch,
        "model": identity(model, prompts[0].tokenizer),
        "pipeline": pipeline.to_dict(),
        "prompts": [
            {
                "spans": dataclasses.asdict(prompt.spans),
                "plan": dataclasses.asdict(run.plan),
                "accounting": _plain(run.accounting),
                "timings": dict(run.timings.as_dict()),
            }
            for prompt, run in zip(prompts, runs, strict=True)
        ],
    }
    ids = {f"prompts.{number}.ids": prompt.ids for number, prompt in enumerate(prompts)}
    write_cache(Path(path), cache, header, ids)


def load(
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    backend: str | Backend | None = None,
) -> CompressionResult | BatchResult:
    """What `result.save(path)` wrote, ready to generate; the model is attached.

    Continuations are those of the result that was saved. Partition, relevance, forest and frontier
    are not in the file: they are None in `result.run`.

    Args:
        path: the file.
        model: the model that the cache was made with; its class, config, dtype and a sample of its
            weights are compared.
        tokenizer: for answers as text; its vocabulary and chat template are compared.
        backend: who attends while decoding; default: what the saved pipeline names.

    Raises:
        SavedCacheError: the file is damaged, of an unknown format, or of another model or
            tokenizer.
        UnsupportedModelError: see `attach`.
    """
    from gracekv.hf.attention import attach
    from gracekv.hf.batch import BatchResult
    from gracekv.hf.cache import GraceCache
    from gracekv.hf.result import CompressionResult
    from gracekv.pipeline import Pipeline

    path = Path(path)
    header = read_header(path)
    _compare(path, header["model"], identity(model, tokenizer))
    packed, header, tensors = read_cache(path, layer_devices(model))
    pipeline = Pipeline.from_dict(header["pipeline"])
    if backend is not None:
        pipeline = dataclasses.replace(pipeline, backend=BACKENDS.parse(backend))
    attach(model)
    cache = GraceCache(packed, pipeline.backend)
    cache.warm(model)
    prompts = tuple(
        Prompt(tensors[f"prompts.{number}.ids"], PromptSpans(**facts["spans"]), None, tokenizer)
        for number, facts in enumerate(header["prompts"])
    )
    runs = tuple(
        _run(facts, packed.sequence(number)) for number, facts in enumerate(header["prompts"])
    )
    if header["batch"]:
        return BatchResult(model, prompts, runs, cache, pipeline)
    accounting = dataclasses.replace(runs[0].accounting, backend_bytes=cache.held_bytes)
    run = dataclasses.replace(runs[0], accounting=accounting)
    return CompressionResult(model, prompts[0], run, cache, pipeline)


def identity(model: Any, tokenizer: Any = None) -> dict[str, str]:
    """`fingerprint` with a digest of the weights, and of the tokenizer's chat template."""
    marks = {**fingerprint(model, tokenizer), "weights": weights_digest(model)}
    if tokenizer is not None:
        template = repr(getattr(tokenizer, "chat_template", None))
        marks["chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:16]
    return marks


def weights_digest(model: Any) -> str:
    """Hash of names, shapes and a few elements of all weights; of offloaded ones no elements."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {list(weight.shape)} {weight.dtype} ".encode())
        data = weight.detach()
        # Quantized tensors of their own class cannot be relied on to be sliced.
        if type(data) is Tensor and data.device.type != "meta" and data.numel():
            flat = data.reshape(-1)
            count = min(_SAMPLES, len(flat))
            at = torch.arange(count, device=flat.device) * (len(flat) // count)
            digest.update(flat[at].cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def layer_devices(model: Any) -> list[torch.device]:
    """Where each decoder layer computes."""
    fallback = input_device(model)
    found = (next(layer.parameters()).device for layer in model.get_decoder().layers)
    return [fallback if device.type == "meta" else device for device in found]


def _compare(path: Path, saved: Mapping[str, str], given: Mapping[str, str]) -> None:
    shared = (saved.keys() & given.keys()) - set(_INFORMATIVE)
    other = sorted(name for name in shared if saved[name] != given[name])
    if other:
        raise SavedCacheError(
            f"{path} was saved from {saved['model_class']} {saved.get('model_name', '')!r}; of the "
            f"model or tokenizer given, {', '.join(other)} differ. Load it with the same weights "
            f"in the same dtype, and the tokenizer that made its ids."
        )


def _plain(accounting: Accounting) -> dict[str, Any]:
    fields = dataclasses.fields(accounting)
    data = {field.name: getattr(accounting, field.name) for field in fields}
    return data | {"entries": accounting.entries.tolist(), "backend_bytes": 0}


def _run(facts: Mapping[str, Any], cache: RaggedCache) -> Run:
    from gracekv.pipeline import Run

    kept = facts["accounting"]
    return Run(
        plan=BudgetPlan(**facts["plan"]),
        partition=None,
        relevance=None,
        forest=None,
        frontier=None,
        cache=cache,
        accounting=Accounting(**(kept | {"entries": torch.tensor(kept["entries"])})),
        timings=Timings(**facts["timings"]),
    )
