"""Compress a language model's KV cache to one budget, and generate from what is left.

`import gracekv` loads nothing heavy: modules are imported when a name below is first used, and
transformers only for names that work with a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gracekv.files import VERSION as __version__

if TYPE_CHECKING:
    from gracekv import recipes as recipes
    from gracekv import report as report
    from gracekv.allocate import Budget as Budget
    from gracekv.decode import Compaction as Compaction
    from gracekv.decode import Limit as Limit
    from gracekv.hf.attention import attached as attached
    from gracekv.hf.capture import capture as capture
    from gracekv.hf.compress import compress as compress
    from gracekv.hf.custom_generate import generate as generate
    from gracekv.hf.load_result import load as load
    from gracekv.hf.result import BatchResult as BatchResult
    from gracekv.hf.result import CompressionResult as CompressionResult
    from gracekv.pipeline import Pipeline as Pipeline
    from gracekv.pipeline.composition import strategies as strategies
    from gracekv.pipeline.run import Run as Run
    from gracekv.prefill import Prefill as Prefill
    from gracekv.prefill import PromptSpans as PromptSpans
    from gracekv.prefill.options import CaptureOptions as CaptureOptions
    from gracekv.prefill.prompt import Prompt as Prompt

_HOMES = {
    "BatchResult": "gracekv.hf.result",
    "Budget": "gracekv.allocate",
    "CaptureOptions": "gracekv.prefill.options",
    "Compaction": "gracekv.decode",
    "CompressionResult": "gracekv.hf.result",
    "Limit": "gracekv.decode",
    "Pipeline": "gracekv.pipeline",
    "Prefill": "gracekv.prefill",
    "Prompt": "gracekv.prefill.prompt",
    "PromptSpans": "gracekv.prefill",
    "Run": "gracekv.pipeline.run",
    "attached": "gracekv.hf.attention",
    "capture": "gracekv.hf.capture",
    "compress": "gracekv.hf.compress",
    "generate": "gracekv.hf.custom_generate",
    "load": "gracekv.hf.load_result",
    "strategies": "gracekv.pipeline.composition",
}

__all__ = ["__version__", "recipes", *_HOMES]


# If type checkers saw this, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("recipes", "report"):
            return import_module(f"gracekv.{name}")
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'gracekv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "report"]
