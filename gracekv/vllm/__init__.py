"""Compressed contexts in vLLM: ragged entries beside its pages, found by name in a store.

`result.export` writes contexts, `request` asks about them, `kv_transfer_config` tells vLLM where
they are; the plugin does the rest. Nothing here imports vLLM before it is used.
"""

from gracekv.vllm.configuration import kv_transfer_config
from gracekv.vllm.requests import Request, request
from gracekv.vllm.store import ContextStore

__all__ = ["ContextStore", "Request", "kv_transfer_config", "request"]
