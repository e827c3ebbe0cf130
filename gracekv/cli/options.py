"""Options that several commands share: the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as the console sees it: the fields of its first argument, then its other ones."""
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    options: Any = first.annotation
    hints = get_type_hints(options, include_extras=True)
    keyword, shared = inspect.Parameter.KEYWORD_ONLY, fields(options)
    parameters = [
        inspect.Parameter(
            field.name,
            keyword,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in shared
    ]

    def called(**given: Any) -> None:
        command(options(**{field.name: given.pop(field.name) for field in shared}), **given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*parameters, *(parameter.replace(kind=keyword) for parameter in own)]
    )
    return called
