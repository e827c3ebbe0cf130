"""Options that several commands share: the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first argument of `command`, a dataclass, by one keyword per field.

    Typer then makes an option of each.
    """
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = first.annotation
    shared = inspect.signature(options, eval_str=True).parameters

    def called(**given: object) -> None:
        command(options(**{name: given.pop(name) for name in shared}), **given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*shared.values(), *keywords]
    )
    return called
