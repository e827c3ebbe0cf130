"""vLLM's configuration: connector, store, attention, and options that contexts do not support."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from gracekv.errors import ConfigError, StoreError
from gracekv.vllm.context_attention import ContextAttention
from gracekv.vllm.header import is_name
from gracekv.vllm.served_model import checkpoint_digests, config_facts
from gracekv.vllm.store import ContextStore
from gracekv.vllm.stored_context import heads_of_rank

# vLLM shows the messages of its own loggers.
LOG = logging.getLogger("vllm.gracekv")

CONNECTOR = "GraceConnector"
"""The name of the connector's class in vLLM."""

_STORE, _LIMIT, _ALLOW = "store", "limit_bytes", "allow"

Allow = Callable[[str, Mapping[str, Any]], object]
"""Whether a request may use a context, from its name and the request's `kv_transfer_params`."""


def kv_transfer_config(
    store: str | os.PathLike[str],
    *,
    limit_bytes: int | None = None,
    allow: str | Sequence[str] | None = None,
) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig`; as JSON, the value of `--kv-transfer-config`.

    Args:
        store: the folder of contexts.
        limit_bytes: maximum bytes of one context, and of all in a process's memory except those
            that requests read; by default a quarter of the machine's memory, or a twenty-fifth of
            the GPU's.
        allow: names of the contexts that requests may use, or "module:function". The function takes
            a context's name and the request's `kv_transfer_params`, and returns whether the request
            may use it. By default every request may use every context.
    """
    names = allow if allow is None or isinstance(allow, str) else list(allow)
    options = {_STORE: str(store), _LIMIT: limit_bytes, _ALLOW: names}
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "gracekv.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {k: v for k, v in options.items() if v is not None},
    }


def has_store(vllm_config: Any) -> bool:
    """Whether an engine has the connector; `vllm_config` may be None."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return transfer is not None and transfer.kv_connector == CONNECTOR


def store_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`root`, `limit` and `allow` of the store in `kv_connector_extra_config`.

    Raises `ConfigError` if there is no such folder, or an option is unknown or unusable.
    """
    if unknown := sorted(extra.keys() - {_STORE, _LIMIT, _ALLOW}):
        raise ConfigError(
            f"kv_connector_extra_config takes {_STORE!r}, {_LIMIT!r} and {_ALLOW!r}; got {unknown}."
        )
    root, limit = extra.get(_STORE), extra.get(_LIMIT)
    if not isinstance(root, str) or not Path(root).is_dir():
        raise ConfigError(
            f"kv_connector_extra_config must name the folder of contexts: "
            f'{{"{_STORE}": "path"}}; got {root!r}, which is not a folder.'
        )
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"{_LIMIT!r} is a number of bytes, at least 1; got {limit!r}.")
    return {"root": Path(root), "limit": limit, "allow": _allowing(extra.get(_ALLOW))}


def _allowing(setting: Any) -> Allow | None:
    if setting is None:
        return None
    if isinstance(setting, list) and all(map(is_name, setting)):
        return lambda name, _: name in setting
    try:
        module, _, function = setting.partition(":")
        allow = getattr(importlib.import_module(module), function)
        if not callable(allow):
            raise TypeError("not a function")
    # A module may raise anything while it is imported.
    except Exception as error:
        raise ConfigError(
            f"{_ALLOW!r} is a list of contexts' names, or 'module:function'; got {setting!r} "
            f"({type(error).__name__}: {error})."
        ) from error
    return cast(Allow, allow)


def refusal(error: Exception) -> str:
    """The message to a client whose request failed; unexpected errors are logged."""
    if isinstance(error, StoreError):
        return str(error)
    LOG.error("A request about a context is refused.", exc_info=error)
    return f"The context cannot be used ({type(error).__name__}). See the server's log."


CPU = {"CPU_ATTN": "gracekv.vllm.backend.GraceCPUAttentionBackend"}
GPU = {
    "FLASH_ATTN": "gracekv.vllm.gpu_backend.GraceFlashAttentionBackend",
    "TRITON_ATTN": "gracekv.vllm.gpu_backend.GraceTritonAttentionBackend",
}
"""Our attention backends by the names of those that they replace."""


def replacements() -> dict[str, str]:
    """`CPU` or `GPU`, depending on the platform; empty on GPUs that the kernels do not support."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU
    return GPU if current_platform.is_cuda() and current_platform.has_device_capability(80) else {}


def attention_layers(vllm_config: Any) -> list[Any]:
    """vLLM's layers with pages; none outside of workers."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "kv_cache") and hasattr(layer, "impl")]


def check_serving(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ConfigError` for options of vLLM that contexts do not support."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    config = vllm_config.compilation_config
    obstacles = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "microbatches": parallel.use_ubatching,
        "speculative decoding": vllm_config.speculative_config is not None,
        f"a KV cache in {cache.cache_dtype}": cache.cache_dtype
        not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")),
        "LoRA adapters": vllm_config.lora_config is not None,
        # Attention would not run as Python; some fusions turn these graphs on anyway.
        "CUDA graphs of whole steps": config.cudagraph_mode.has_full_cudagraphs(),
        "layers of several kinds": len(kv_cache_config.kv_cache_groups) > 1,
        # Requests are refused, opened and continued by wrappers of Python's front end.
        "the front end in Rust": os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
    }
    if found := [name for name, there in obstacles.items() if there]:
        raise ConfigError(
            f"Compressed contexts cannot be served with {' and '.join(found)}. Serve without it, "
            f"or remove the KV connector."
        )


def check_attention(layers: list[Any], page: int) -> None:
    """Raise `ConfigError` if attention cannot read contexts, or reads pages in smaller blocks.

    Args:
        layers: vLLM's attention layers.
        page: tokens per page.
    """
    if stock := {type(x.impl).__name__ for x in layers if not isinstance(x.impl, ContextAttention)}:
        raise ConfigError(
            f"Compressed contexts cannot be served by {' and '.join(sorted(stock))}. They need the "
            f"plugin 'gracekv' (VLLM_PLUGINS, if set, must name it) and, on NVIDIA GPUs of compute "
            f"capability 8.0 or newer, --attention-backend FLASH_ATTN or TRITON_ATTN. Set these, "
            f"or remove the KV connector."
        )
    if sizes := sorted({layer.kv_cache.shape[2] for layer in layers} - {page}):
        raise ConfigError(
            f"Attention must read whole pages; got pages of {page} tokens, read in blocks of "
            f"{sizes[0]}. Serve with --block-size {sizes[0]}."
        )


def open_store(
    vllm_config: Any, rank: int | None = None, device: torch.device | None = None
) -> ContextStore:
    """The store in `--kv-transfer-config`, for the served model.

    Args:
        vllm_config: vLLM's config.
        rank: tensor-parallel rank of a process that loads contexts; None if it only reads headers.
        device: device of the entries; by default the CPU.

    Raises `ConfigError` if an option of the store is unusable.
    """
    options = store_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
    model = vllm_config.model_config
    facts = config_facts(model.hf_text_config, model.dtype)
    folder = checkpoint_folder(model.model, model.revision)
    facts["quantised"] = model.quantization is not None
    facts["weights"] = folder and checkpoint_digests(folder, model.dtype)
    if facts["weights"] is None:
        LOG.warning(
            "%s is not a folder of safetensors files, so its weights cannot be compared with those "
            "that made the contexts.",
            model.model,
        )
    size = vllm_config.parallel_config.tensor_parallel_size
    heads = heads_of_rank(facts["kv_heads"], size, rank) if rank is not None and size > 1 else None
    return ContextStore(**options, model=facts, heads=heads, device=device)


def checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """The folder of the weights: `model` itself, or the hub's cache of it; None if unknown."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        # The folder has the files that vLLM fetched, and lacks others of the repository.
        path = getattr(error, "snapshot_path", None)
        return None if path is None else Path(path)
