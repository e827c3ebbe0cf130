"""`kv_transfer_config`: how vLLM is told about the connector and the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracekv.errors import ConfigError

CONNECTOR = "GraceConnector"
"""The connector's class, by which vLLM knows it."""

_STORE, _LIMIT = "store", "limit_bytes"


def kv_transfer_config(
    store: str | os.PathLike[str], *, limit_bytes: int | None = None
) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig`, or as JSON for `--kv-transfer-config`.

    Args:
        store: the folder of contexts.
        limit_bytes: most bytes of contexts that a process keeps in memory; None: no limit.
    """
    options = {_STORE: str(store)} | ({} if limit_bytes is None else {_LIMIT: limit_bytes})
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "gracekv.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": options,
    }


def has_store(vllm_config: Any) -> bool:
    """Whether an engine has the connector; `vllm_config` may be None."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return transfer is not None and transfer.kv_connector == CONNECTOR


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What `kv_connector_extra_config` says.

    Attributes:
        root: the folder of contexts.
        limit: most bytes of contexts in memory, or None.
    """

    root: Path
    limit: int | None

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> StoreOptions:
        """Raises `ConfigError` if there is no such folder, or an option is unknown."""
        unknown = sorted(extra.keys() - {_STORE, _LIMIT})
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config takes {_STORE!r} and {_LIMIT!r}; got {unknown}."
            )
        root, limit = extra.get(_STORE), extra.get(_LIMIT)
        if not isinstance(root, str) or not Path(root).is_dir():
            raise ConfigError(
                f"kv_connector_extra_config must name the folder of contexts: "
                f'{{"{_STORE}": "path"}}; got {root!r}, which is no folder.'
            )
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"{_LIMIT!r} is a number of bytes, at least 1; got {limit!r}.")
        return cls(Path(root), limit)
