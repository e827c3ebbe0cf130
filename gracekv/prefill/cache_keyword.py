"""The keyword by which models take a cache: `cache`, before transformers 5.24 `past_key_values`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("cache", "past_key_values")


def given_cache(options: Mapping[str, Any]) -> Any:
    """The cache among the options of a forward, or None."""
    return next((options[name] for name in NAMES if options.get(name) is not None), None)


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The keyword that `forward` takes a cache by."""
    return NAMES[NAMES[0] not in inspect.signature(forward).parameters]
