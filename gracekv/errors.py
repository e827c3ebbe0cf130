"""Named errors. Each message says what was given, what is allowed and how to fix it.

All errors derive from `GracekvError`; those caused by an argument are also `ValueError`s, so
existing handlers still catch them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class GracekvError(Exception):
    """Base of every error that gracekv raises on purpose."""


class PromptError(GracekvError, ValueError):
    """The prompt's text, ids or spans cannot be used (empty, too short, out of range)."""


class EditedHistoryError(PromptError):
    """A list of messages differs from what a conversation has read."""


class BudgetError(GracekvError, ValueError):
    """The requested ratio, entries or bytes are malformed or too small."""


class ShapeError(GracekvError, ValueError):
    """A tensor's shape, dtype or batch size does not fit the others."""


class NonFiniteError(GracekvError, ValueError):
    """A captured tensor holds NaN or infinity, so no selection made from it could be trusted."""


class ConfigError(GracekvError, ValueError):
    """A configuration value is outside its range, of the wrong type, or unknown."""


class ObserverError(ConfigError):
    """An observer needs something that this kind of prefill cannot provide."""


class UnknownStrategyError(ConfigError):
    """No strategy of that name is registered for the stage."""


class PluginError(ConfigError):
    """A module that registers strategies or recipes cannot be imported."""


class PluginWarning(UserWarning):
    """An installed plugin cannot be imported, so its strategies and recipes are missing."""


class UnsupportedModelError(GracekvError):
    """The model breaks an assumption (no RoPE, training mode), or fails the check when untested."""


class LayerOrderError(UnsupportedModelError):
    """The model calls its layers out of order, or changes torch's settings while it runs."""


class WholeCacheWarning(UserWarning):
    """The full cache is held before compression: the model cannot be read layer by layer."""


class SlowAttentionWarning(UserWarning):
    """FlashAttention does not support the model's heads or dtype; chunks use a slower kernel."""


class UntestedModelWarning(UserWarning):
    """The model's family is not tested; it passed a check on a short random prompt."""


class RankError(GracekvError, RuntimeError):
    """A process of a sharded model failed, exited, is late, or made a different call."""


class MissingCaptureError(GracekvError):
    """A strategy needs something that the prefill capture did not keep."""


class CaptureMemoryError(GracekvError, MemoryError):
    """A capture ran out of memory; the message says which lengths or limits would fit."""


class CacheError(GracekvError):
    """The compressed cache was used in a way that would give wrong answers."""


class SavedCacheError(GracekvError, ValueError):
    """A saved cache is damaged, has an unknown format, or belongs to another model."""


class OutputError(GracekvError, OSError):
    """A file cannot be written: it is not a regular file, or the disk is full or read-only."""


class StoreError(GracekvError, ValueError):
    """A context for another engine is missing, damaged, badly named, or for another model."""


class BackendUnavailableError(GracekvError):
    """The requested attention backend cannot run on this machine."""


class ReportError(GracekvError, ValueError):
    """No report can be made of this result: it was loaded from a file, or prompts differ."""


class MissingDependencyError(GracekvError, ImportError):
    """An optional package that this feature needs is not installed."""


def required(module: str, extra: str, package: str = "") -> Any:
    """Import an optional module.

    Raises `MissingDependencyError` naming `package` (default: the module's) and our extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and str(error.name).startswith(top)
        why = "" if missing else f", which cannot be imported ({error})"
        raise MissingDependencyError(
            f"This needs the package {package or top!r}{why}. Install it with: "
            f"pip install 'gracekv[{extra}]'"
        ) from error


def expect(value: object, kind: Any, takes: str, error: type[GracekvError] = ConfigError) -> None:
    """Raise `error`, which says what a call `takes`, unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise error(f"{takes}; got {type(value).__name__}.")


def one_of(
    name: str, value: object, known: Collection[str], error: type[GracekvError] = ConfigError
) -> None:
    """Raise `error`, suggesting the nearest name, unless `value` of `name` is in `known`."""
    if value not in known:
        near = suggestion(str(value), list(known))
        raise error(f"{name} takes one of {', '.join(known)}; got {value!r}.{near}")


def suggestion(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name or what it maps to, or nothing."""
    written = known if isinstance(known, Mapping) else {x: x for x in known}
    near = get_close_matches(name.lower(), written, n=1)
    return "".join(f" Did you mean {written[x]!r}?" for x in near)


def renamed(old: str, new: str) -> Any:
    """A property that returns `new` under its `old` name, with a `DeprecationWarning`."""

    def read(self: Any) -> Any:
        _warn_of_old(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")


def renamed_in(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`: `names` maps old names to new; using one warns."""

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn_of_old(f"{module}.{name}", names[name])
        return getattr(import_module(module), names[name])

    return read


def _warn_of_old(name: str, new: str) -> None:
    message = f"{name} is now {new}; the old name will go in the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=3)


class LengthWarning(UserWarning):
    """The prompt is longer than the model was trained for, or close to where its cache ends."""


class TaskError(GracekvError, ValueError):
    """A benchmark task is unknown, does not fit the length asked for, or lacks its data."""
