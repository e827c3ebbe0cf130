"""Load strategies and recipes from other packages, by entry point or by module name.

A package declares its modules in the entry-point group `gracekv.strategies`; importing a module
registers its strategies and recipes. They are loaded the first time a registry is read, not by
`import gracekv`. Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module, metadata
from typing import Any

from gracekv.errors import ConfigError, PluginError, PluginWarning
from gracekv.registry.hyperparameter import parts_of

GROUP = "gracekv.strategies"
"""The entry-point group; each entry names a module."""

_lock = threading.RLock()
_loading = False
_loaded = False
# Entry points that were imported, by name and value: "" or the reason for a failure.
_tried: dict[tuple[str, str], str] = {}


def load_plugins() -> None:
    """Import the modules of all installed plugins, once, ordered by name.

    A plugin that cannot be imported, or that exits while it is imported, is skipped with a
    `PluginWarning`; the others load. A user's interrupt propagates, and the next call continues
    from there.
    """
    global _loading, _loaded
    with _lock:
        # The same thread re-enters if a plugin reads a registry while it is imported.
        if _loaded or _loading:
            return
        _loading = True
        try:
            entries = {(e.name, e.value): e for e in metadata.entry_points(group=GROUP)}
            for key in sorted(entries.keys() - _tried.keys()):
                _tried[key] = _described(_failure(entries[key].load))
            _loaded = True
        finally:
            _loading = False
        # After all are loaded, since users may have made this warning an error.
        for (name, value), why in _tried.items():
            if why:
                warnings.warn(
                    f"The gracekv plugin {name!r} ({value}) cannot be imported; its strategies and "
                    f"recipes are missing. {why}. Repair or uninstall its package.",
                    PluginWarning,
                    stacklevel=2,
                )


def _failure(action: Callable[[], object]) -> BaseException | None:
    """The exception that `action` raised, including SystemExit; interrupts propagate."""
    try:
        action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def _described(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register strategies or recipes, also from the current folder.

    Raises `PluginError` if one cannot be imported, or exits while it is imported.
    """
    for name in names:
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
        if error := _failure(functools.partial(import_module, name)):
            raise PluginError(
                f"The module {name!r}, which should register strategies, cannot be imported: "
                f"{_described(error)}. Install its package, or run in the folder with "
                f"{name.partition('.')[0]}.py and give its name: {name.removesuffix('.py')!r}."
            ) from error


def module_list(value: object, where: str) -> tuple[str, ...]:
    """The `imports` of a file as module names; `ConfigError` unless they are a list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(x, str) and x for x in value):
        raise ConfigError(f"imports in {where} takes a list of modules; got {value!r}.")
    return tuple(value)


def missing_hint() -> str:
    """The end of an error about an unknown name: how to register it, and broken plugins."""
    broke = [f" The plugin {name!r} is broken: {why}." for (name, _), why in _tried.items() if why]
    return (
        f"A strategy of another package is available once that is installed (entry-point group "
        f"{GROUP!r}) or its module imported (on the command line: --import MODULE).{''.join(broke)}"
    )


def foreign_modules(value: Any) -> dict[str, str]:
    """Modules outside gracekv that define classes in `value`, a nested dataclass.

    Maps each module to the name and version of its distribution, or "" if unknown.
    """
    homes = {type(x).__module__ for x in parts_of(value) if dataclasses.is_dataclass(x)}
    if modules := {home: "" for home in sorted(homes) if home.partition(".")[0] != "gracekv"}:
        owners = metadata.packages_distributions()
        for module in modules:
            for owner in owners.get(module.partition(".")[0], ())[:1]:
                modules[module] = f"{owner} {metadata.version(owner)}"
    return modules


def missing_modules(modules: object) -> str:
    """A sentence that names the `modules` of `foreign_modules` not imported yet, or ""."""
    named = modules if isinstance(modules, Mapping) else {}
    missing = {module: owner for module, owner in named.items() if module not in sys.modules}
    if not missing:
        return ""
    fixes = {x: f"package {y}: install it" if y else "import it" for x, y in missing.items()}
    parts = [f"{module!r} ({fix})" for module, fix in fixes.items()]
    return f" It was made with strategies of the modules {', '.join(parts)}."
