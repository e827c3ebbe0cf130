"""The keyword for a model's cache: `cache`, or `past_key_values` before transformers 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("cache", "past_key_values")


def given_cache(options: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward, or None."""
    return next((options[name] for name in NAMES if options.get(name) is not None), None)


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The keyword argument of `forward` for a cache."""
    return NAMES[NAMES[0] not in inspect.signature(forward).parameters]
