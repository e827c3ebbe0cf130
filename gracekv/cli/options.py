"""Options that several subcommands share."""

from __future__ import annotations

from typing import Annotated

import typer


def _import(names: list[str] | None) -> list[str] | None:
    from gracekv.registry.plugins import import_modules

    import_modules(names or ())
    return names


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import,
        is_eager=True,
        help="Import this module first: it registers strategies or recipes; may be repeated.",
    ),
]
"""Acts when the option is read, so that commands take it and need not use it."""
