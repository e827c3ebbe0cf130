"""Compressed contexts in vLLM: ragged entries outside its pages, stored by name.

`Client` has a server compress documents and answer questions about them. `export` writes contexts
that were compressed elsewhere, and `request` makes questions about them. `kv_transfer_config`
configures vLLM, and the plugin does the rest. Importing this package does not import vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gracekv.vllm.chatting import ServedConversation as ServedConversation
from gracekv.vllm.client import Client as Client
from gracekv.vllm.requests import Request as Request
from gracekv.vllm.requests import document as document
from gracekv.vllm.requests import request as request
from gracekv.vllm.server import Context as Context
from gracekv.vllm.serving import kv_transfer_config as kv_transfer_config
from gracekv.vllm.store import ContextStore as ContextStore

if TYPE_CHECKING:
    from gracekv.vllm.exporting import export as export


# If type checkers saw this, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # `export` imports transformers, which serving does not need.
        if name == "export":
            return import_module("gracekv.vllm.exporting").export
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
