"""Bounds of hyperparameters, declared on the fields and checked in one place.

`window: int = bounded(32, at_least=1)` declares one. A `Configurable` (see `gracekv.registry`)
checks its fields when it is built. Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any

from gracekv.errors import ConfigError

_KEY = "gracekv.bounds"
_LARGEST = sys.float_info.max
_LIMITS = {"at_least": (">=", ge), "at_most": ("<=", le), "above": (">", gt), "below": ("<", lt)}
_KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that a hyperparameter may take.

    Attributes:
        at_least: smallest value.
        at_most: largest value; infinity is refused unless it is this.
        above: lower bound that values must exceed.
        below: upper bound that values must stay under.
        odd: whole numbers must be odd.
        distinct: items of a tuple must differ.
        hint: a last sentence of the error that explains the number or names a good one.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    odd: bool = False
    distinct: bool = False
    hint: str = ""

    def _limits(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        """Sign, comparison and number of each limit that is set."""
        numbers = ((*x, getattr(self, name)) for name, x in _LIMITS.items())
        return [(sign, fits, limit) for sign, fits, limit in numbers if limit is not None]

    def allow(self, value: float) -> bool:
        """Whether one number is within the bounds; NaN never is."""
        finite = abs(value) <= _LARGEST or value == self.at_most
        inside = all(fits(value, limit) for _, fits, limit in self._limits())
        return finite and inside and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        parts = [f"{sign} {limit}" for sign, _, limit in self._limits()]
        if self.at_least is not None and self.at_most is not None:
            parts[:2] = [f"from {self.at_least} to {self.at_most}"]
        return " and ".join(["odd"] * self.odd + parts) or "finite"


def bounded(default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A dataclass field with `Bounds`; those of a tuple, which must have items, hold for each item.

    `bounds` are the fields of `Bounds`. A default outside the bounds raises when the class is first
    instantiated.
    """
    return dataclasses.field(default=default, metadata={_KEY: Bounds(**bounds)})


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """The bounds that `bounded` declared on a dataclass field, or None."""
    return field.metadata.get(_KEY)


def parts_of(value: Any) -> Iterator[Any]:
    """`value` and its parts: items of tuples, lists and mappings, and fields of dataclasses."""
    yield value
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    for item in items:
        yield from parts_of(item)


def check_values(cls: type, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless values of fields of `cls`, by name, fit their types and bounds.

    Checks numbers, strings, `Literal`s, instances of other classes, tuples of those, and `None`
    where it is allowed. A whole number is accepted as a float.
    """
    for field, hint in typed_fields(cls):
        if field.name in values and field.name not in getattr(cls, "own_checks", ()):
            where = f"{cls.__name__}.{field.name}"
            check_value(values[field.name], hint, bounds_of(field), where)


# A compression reads dozens of strategies, and the annotations of a class do not change.
@functools.cache
def typed_fields(cls: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """The fields of a dataclass, each with its evaluated type.

    Raises `ConfigError` for annotations that cannot be evaluated.
    """
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:
        text = f"The annotations of {cls.__name__} cannot be evaluated: {error}."
        if isinstance(error, NameError | AttributeError):
            text += " Define or import it at the top of the module, outside of `if TYPE_CHECKING:`."
        raise ConfigError(text) from error
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


def check_value(value: Any, hint: Any, bounds: Bounds | None = None, where: str = "") -> None:
    """Raise `ConfigError` unless `value`, of the field `where`, fits an annotation and bounds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wanted = ""
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if value is None and len(inner) < len(args):
            return
        problems = []
        for kind in inner:
            try:
                check_value(value, kind, bounds, where)
            except ConfigError as problem:
                problems.append(str(problem))
        if len(problems) == len(inner):
            raise ConfigError(" Or: ".join(problems))
    elif origin is typing.Literal:
        if value not in args or isinstance(value, bool) not in {isinstance(x, bool) for x in args}:
            wanted = f"one of {', '.join(map(repr, args))}"
    elif origin is Callable:
        wanted = "" if callable(value) else "a function"
    elif origin is tuple:
        if not isinstance(value, tuple):
            wanted = "a tuple (in plain data: a list)"
        elif bounds is not None and not value:
            wanted = "at least one item"
        elif Ellipsis not in args and len(value) != len(args):
            wanted = f"{len(args)} items"
        elif bounds is not None and bounds.distinct and len(set(value)) < len(value):
            wanted = "distinct items"
        else:
            kinds = args[:1] * len(value) if ... in args else args
            for item, kind in zip(value, kinds, strict=True):
                check_value(item, kind, bounds, where)
    elif hint in _KINDS:
        bounds = bounds if hint in (int, float) else None
        fits = isinstance(value, int | float if hint is float else hint)
        # True is an int in Python, but not a number here.
        fits = fits and (hint is bool) == isinstance(value, bool)
        # Whole numbers may exceed every float.
        fits = fits and not (hint is float and isinstance(value, int) and abs(value) > _LARGEST)
        if not fits or (bounds is not None and not bounds.allow(value)):
            wanted = _KINDS[hint] if bounds is None else f"{_KINDS[hint]} {bounds}"
    elif isinstance(hint, type) and not isinstance(value, hint):
        wanted = f"an instance of {hint.__name__}"
    if wanted:
        advice = f" {bounds.hint}" if bounds is not None and bounds.hint else ""
        raise ConfigError(f"{where} takes {wanted}; got {value!r}.{advice}")
