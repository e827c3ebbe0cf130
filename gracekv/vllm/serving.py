"""What vLLM's configuration means for contexts: what cannot be served, and which store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gracekv.errors import ConfigError
from gracekv.vllm.configuration import StoreOptions
from gracekv.vllm.model_facts import checkpoint_digest, config_facts
from gracekv.vllm.store import ContextStore, heads_of_rank

BACKEND = "gracekv.vllm.backend.GraceCPUAttentionBackend"


def serves_ragged() -> bool:
    """Whether this process attends to ragged contexts: on CPUs, with the plugin loaded."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path: str = AttentionBackendEnum.CPU_ATTN.get_path()
    return bool(current_platform.is_cpu()) and path == BACKEND


def check_serving(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ConfigError` for what contexts were never served with, naming it."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    obstacles = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        f"a KV cache in {cache.cache_dtype}": cache.cache_dtype
        not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")),
        "layers of several kinds": len(kv_cache_config.kv_cache_groups) > 1,
    }
    found = [name for name, there in obstacles.items() if there]
    if found:
        raise ConfigError(
            f"Compressed contexts cannot be served with {' and '.join(found)}. Serve without it, "
            f"or take the KV connector out."
        )


def open_store(vllm_config: Any, rank: int | None = None) -> ContextStore:
    """The store that `--kv-transfer-config` names, for the model that is served.

    Args:
        vllm_config: vLLM's.
        rank: tensor-parallel rank of the process that loads contexts; None: it only reads headers.

    Raises `ConfigError` if there is no such folder.
    """
    options = StoreOptions.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    model = vllm_config.model_config
    facts = config_facts(model.hf_text_config, model.dtype)
    folder = checkpoint_folder(model.model, model.revision)
    facts["weights"] = folder and checkpoint_digest(folder, model.dtype, facts)
    heads = None
    size = vllm_config.parallel_config.tensor_parallel_size
    if rank is not None and size > 1:
        heads = heads_of_rank(facts["kv_heads"], size, rank)
    return ContextStore(
        options.root, model=facts, limit=options.limit, heads=heads, ragged=serves_ragged()
    )


def checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """Where the weights lie: the folder itself, or where the hub's are kept; None if unknown."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
