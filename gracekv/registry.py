"""Strategies and the registries that name them.

A strategy is a frozen dataclass: its fields are its hyperparameters, its defaults the paper's. It
is therefore comparable, printable and serialisable, and a `Pipeline` of strategies is a value.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Generic, TypeVar

from gracekv.errors import ConfigError, UnknownStrategyError
from gracekv.hyperparameter import check_fields


class Configurable:
    """A frozen dataclass that checks its fields and turns into plain data and back.

    Fields may be numbers, strings, booleans, None, tuples of those, other `Configurable`s, or
    `Strategy`s (stored as ``{"name": ..., **fields}``). Types, choices (`Literal`) and bounds
    (`gracekv.hyperparameter.bounded`) are checked when an instance is built.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` if fields that are fine one by one do not fit together."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data (lists for tuples), ready for JSON, YAML or TOML."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: _plain(getattr(self, field.name)) for field in fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> typing.Self:
        """The inverse of `to_dict`; fields left out keep their defaults.

        Raises `ConfigError` on an unknown key or a value of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{cls.__name__} is configured by a mapping of its fields; got {data!r} "
                f"({type(data).__name__})."
            )
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in names:
                allowed = ", ".join(names) or "none: it takes no parameters"
                raise ConfigError(
                    f"{cls.__name__} has no field {key!r}.{suggestion(str(key), names)} "
                    f"Fields: {allowed}."
                )
        values = {
            key: _typed(value, hints[key], f"{cls.__name__}.{key}") for key, value in data.items()
        }
        return cls(**values)


class Strategy(Configurable):
    """One way to do one stage; registered under `name` in its stage's `Registry`."""

    name: ClassVar[str]
    registry: ClassVar[Registry[Any]]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


S = TypeVar("S", bound=Strategy)
C = TypeVar("C", bound=Strategy)


class Registry(Generic[S]):
    """Names to strategy classes, for one stage."""

    def __init__(self, stage: str, summary: str) -> None:
        self.stage = stage
        self.summary = summary
        self._classes: dict[str, type[S]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        """Class decorator: make a strategy available under `name`.

        Raises `ConfigError` if the name is taken.
        """

        def add(cls: type[C]) -> type[C]:
            if name in self._classes:
                raise ConfigError(
                    f"{self.stage} strategy {name!r} is already registered by "
                    f"{self._classes[name].__qualname__}. Choose another name."
                )
            cls.name = name
            cls.registry = self
            self._classes[name] = cls  # type: ignore[assignment]
            return cls

        return add

    def get(self, name: str) -> type[S]:
        """The class registered as `name`; `UnknownStrategyError` with the nearest name if none."""
        if name not in self._classes:
            raise UnknownStrategyError(
                f"Unknown {self.stage} strategy {name!r}.{suggestion(str(name), list(self))} "
                f"Registered: {', '.join(self)}. To add yours, decorate its class with "
                f"@register({str(name)!r}) of the stage's registry and import its module."
            )
        return self._classes[name]

    def build(self, name: str, **params: Any) -> S:
        """An instance of the strategy `name` with these fields."""
        return self.get(name).from_dict(params)

    def parse(self, spec: object) -> S:
        """A strategy from its name, from ``{"name": ..., **fields}``, or from itself.

        Raises `ConfigError` for anything else, `UnknownStrategyError` for an unknown name.
        """
        if isinstance(spec, str):
            return self.build(spec)
        if isinstance(spec, Mapping):
            fields = {str(key): value for key, value in spec.items()}
            name = fields.pop("name", None)
            if not isinstance(name, str):
                raise ConfigError(
                    f"A {self.stage} strategy given as a mapping needs a 'name'; got "
                    f"{dict(spec)!r}. "
                    f"Registered: {', '.join(self)}."
                )
            return self.build(name, **fields)
        if isinstance(spec, Strategy) and type(spec) is self._classes.get(spec.name):
            return spec
        raise ConfigError(
            f"Expected a {self.stage} strategy: a name, a mapping with a 'name', or an instance; "
            f"got {spec!r}. Registered: {', '.join(self)}."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        return len(self._classes)


def suggestion(name: str, known: list[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or nothing."""
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Configurable):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type, converting what plain data cannot spell (tuples, 1 -> 1.0)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [arg for arg in args if arg is not type(None)]
        return _typed(value, inner[0], where) if len(inner) == 1 else value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} takes a list; got {value!r}.")
        return tuple(_typed(item, args[0], where) for item in value)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where} takes one of {', '.join(map(repr, args))}; got {value!r}.")
        return value
    if isinstance(hint, type) and issubclass(hint, Strategy):
        return hint.registry.parse(value)
    if isinstance(hint, type) and issubclass(hint, Configurable):
        return value if isinstance(value, hint) else hint.from_dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        raise ConfigError(f"{where} takes {hint.__name__}; got {value!r} ({type(value).__name__}).")
    return value
