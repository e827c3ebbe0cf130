"""transformers: the cache class, the attention function, compression of a model's prompt.

Importing this package makes the task "gracekv-text-generation" known to `transformers.pipeline`,
if transformers is installed, and changes nothing else; `import gracekv` alone does not. `compress`
is at the top, `gracekv.compress`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from gracekv.errors import required

if TYPE_CHECKING:
    from gracekv.hf.attention import attach as attach
    from gracekv.hf.attention import detach as detach
    from gracekv.hf.cache import GraceCache as GraceCache
    from gracekv.hf.result import BatchResult as BatchResult
    from gracekv.hf.result import CompressionResult as CompressionResult
    from gracekv.hf.text_generation import GraceTextGeneration as GraceTextGeneration

_HOMES = {
    "BatchResult": "result",
    "CompressionResult": "result",
    "GraceCache": "cache",
    "GraceTextGeneration": "text_generation",
    "attach": "attention",
    "detach": "attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    required("transformers", "hf")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if importlib.util.find_spec("transformers") is not None:
    importlib.import_module(f"{__name__}.text_generation").register()
