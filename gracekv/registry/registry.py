"""Strategies and the registries that name them.

A strategy is a frozen dataclass: its fields are its hyperparameters, its defaults those of the
paper. It can therefore be compared, printed and saved, and a `Pipeline` of strategies is a value.

Reading a registry loads the installed plugins first (`gracekv.registry.plugins`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from gracekv.errors import ConfigError, UnknownStrategyError, expect, suggestion
from gracekv.registry.hyperparameter import check_value, check_values, typed_fields
from gracekv.registry.plugins import load_plugins, missing_hint


class Configurable:
    """A frozen dataclass that checks its fields and converts to plain data and back.

    Fields may be numbers, strings, booleans, None, tuples of those, other `Configurable`s, or
    `Strategy`s (stored as ``{"name": ..., **fields}``). Types, choices (`Literal`) and bounds
    (`gracekv.registry.hyperparameter.bounded`) are checked when an instance is built.

    Attributes:
        removed_fields: names of fields that the class had in an earlier release, each with the only
            value that saved data may still give it; other values are rejected.
        own_checks: names of fields that only `check` checks.
    """

    removed_fields: ClassVar[tuple[tuple[str, object], ...]] = ()
    own_checks: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        check_values(type(self), {field.name: getattr(self, field.name) for field in fields})
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` if fields that are valid on their own do not fit together."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data (lists for tuples), ready for JSON, YAML or TOML."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: _plain(getattr(self, field.name)) for field in fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> typing.Self:
        """The inverse of `to_dict`; fields left out keep their defaults.

        Raises `ConfigError` for an unknown or missing key or a value of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{cls.__name__} takes a mapping of its fields; got {data!r}.")
        data = {key: value for key, value in data.items() if (key, value) not in cls.removed_fields}
        hints = {field.name: hint for field, hint in typed_fields(cls)}  # type: ignore[arg-type]
        for key in data:
            if key not in hints:
                hint = suggestion(str(key), list(hints))
                allowed = ", ".join(hints) or "none: it takes no parameters"
                raise ConfigError(f"{cls.__name__} has no field {key!r}.{hint} Fields: {allowed}.")
        values = {key: _converted(value, hints[key]) for key, value in data.items()}
        # Before the class runs its own checks, which may rely on types.
        check_values(cls, values)
        # Without a default, both are MISSING.
        needed = [x.name for x, _ in typed_fields(cls) if x.default is x.default_factory]  # type: ignore[arg-type]
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}; got {dict(data)}.")
        return cls(**values)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Strategy(Configurable):
    """One way to do one stage; registered under `name` in its stage's `Registry`.

    Attributes:
        works_sharded: whether its result is the same if each process holds some of the KV heads
            (`Prefill.shard`); other strategies are rejected there. Set by `Registry.register`.
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Any]]
    works_sharded: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


# Strategies of 0.2 that were removed, and their replacements.
_REMOVED = {
    "midpoint": "{'name': 'binary', 'candidates': 0, 'reward': 0}",
    "exhaustive": "'binary_extract'",
    "fixed_chunks": "{'name': 'uniform', 'target_length': 10}",
    "global_mix": "'global' or 'adaptive_heads'",
}

S = TypeVar("S", bound=Strategy)
C = TypeVar("C", bound=Strategy)


class Registry(Generic[S]):
    """A mapping from names to strategy classes, for one stage.

    Args:
        stage: the name of the stage.
        summary: the decision that the stage makes.
        interface: base class of its strategies; fields of this type are read from plain data.
    """

    def __init__(self, stage: str, summary: str, interface: type[S] | None = None) -> None:
        self.stage = stage
        self.summary = summary
        self._classes: dict[str, type[S]] = {}
        self._base: type[Any] = interface or Strategy
        if interface is not None:
            interface.registry = self

    def register(self, name: str, *, works_sharded: bool = False) -> Callable[[type[C]], type[C]]:
        """Class decorator: register a strategy as `name`, and make it a frozen final dataclass.

        `works_sharded` is as in `Strategy`; a base class may have set it already. A class that is
        defined again (a notebook cell that runs twice) replaces itself. Raises `ConfigError` if
        another class has the name, or if the class derives from a strategy of gracekv, is mutable,
        or has fields named like attributes of `Strategy` or methods of the stage's base class.
        """
        expect(name, str, "@register takes a strategy's name, as in @register('mine')")

        def add(cls: Any) -> Any:
            if "__dataclass_params__" not in vars(cls):
                cls = dataclasses.dataclass(frozen=True)(cls)
            known, own = _full_name(self._classes.get(name, cls)), _full_name(cls)
            fixed = {x for x in dir(self._base) if callable(getattr(self._base, x))}
            taken = {"name", "registry", *dir(Strategy), *fixed}
            taken &= {x.name for x in dataclasses.fields(cls)}
            # A property of the base would be the field's default.
            taken |= {x.name for x in dataclasses.fields(cls) if isinstance(x.default, property)}
            ours = (x for x in cls.__mro__[1:] if x.__module__.startswith("gracekv."))
            parents = [_full_name(x) for x in ours if "__final__" in vars(x)]
            wrong = {
                f"must derive from {self._base.__name__}": not issubclass(cls, self._base),
                f"needs another name: {name!r} is already registered by {known}": known != own,
                f"derives from {parents}, which is final: hold one in a field instead": parents,
                "can change: write @dataclass(frozen=True)": not cls.__dataclass_params__.frozen,
                f"has fields {sorted(taken)}, names that the stage uses: rename them": taken,
            }
            for problem in filter(wrong.get, wrong):
                raise ConfigError(f"{own} {problem}.")
            typing.final(cls).name = name
            cls.works_sharded |= works_sharded
            cls.registry = self
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type[S]:
        """The class registered as `name`; `UnknownStrategyError` suggests the nearest name."""
        classes = self._known()
        if name not in classes:
            hint = suggestion(str(name), list(self))
            if name in _REMOVED:
                hint = f" It was removed after 0.2; use {_REMOVED[name]}."
            raise UnknownStrategyError(
                f"Unknown {self.stage} strategy {name!r}.{hint} "
                f"Registered: {', '.join(self)}. To add yours, decorate its class with "
                f"@register({str(name)!r}) of the stage's registry. {missing_hint()}"
            )
        return classes[name]

    def build(self, name: str, **params: Any) -> S:
        """An instance of the strategy `name` with these fields."""
        return self.get(name).from_dict(params)

    def parse(self, spec: object) -> S:
        """A strategy from its name, from ``{"name": ..., **fields}``, or from an instance.

        Raises `ConfigError` for anything else, including instances of classes that are not
        registered or were defined again; `UnknownStrategyError` for an unknown name.
        """
        if isinstance(spec, str):
            return self.build(spec)
        if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
            fields = {str(key): value for key, value in spec.items()}
            return self.get(fields.pop("name")).from_dict(fields)
        if isinstance(spec, self._base) and spec.registry is self:
            if (cls := type(spec)) is self._classes.get(vars(cls).get("name", "")):
                return spec  # type: ignore[no-any-return]
            new = f"is not registered: decorate {cls.__name__} with @register('a_name')"
            again = f"was defined again since {spec} was made: make it again"
            raise ConfigError(f"{_full_name(cls)} {again if 'name' in vars(cls) else new}.")
        raise ConfigError(
            f"Expected a {self.stage} strategy: a name, a mapping with a 'name', or an instance; "
            f"got {spec!r}. Registered: {', '.join(self)}."
        )

    def _known(self) -> dict[str, type[S]]:
        load_plugins()
        return self._classes

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())


def _plain(value: Any) -> Any:
    if isinstance(value, Configurable):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _converted(value: Any, hint: Any) -> Any:
    """`value` as the annotated type if plain data cannot express it: tuples, strategies, 1.0.

    A value that does not fit is returned unchanged; `check_values` then rejects it.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if value is None or len(inner) == 1:
            return value if value is None else _converted(value, inner[0])
        # First as it is; but a whole number becomes a float if the union has no int.
        as_it_is = [] if type(value) is int and int not in inner else [None]
        for kind in [*as_it_is, *inner]:
            with contextlib.suppress(ConfigError):
                check_value(made := value if kind is None else _converted(value, kind), hint)
                return made
        return _converted(value, inner[0])
    if origin is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if ... in args else (*args, *map(type, value))
        return tuple(_converted(x, kind) for x, kind in zip(value, kinds, strict=False))
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Strategy):
        return hint.registry.parse(value)
    if isinstance(hint, type) and issubclass(hint, Configurable):
        return value if isinstance(value, hint) else hint.from_dict(value)
    return value
