"""The measures of a row that a table can show: score, fidelity to FullKV, memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gracekv.errors import one_of
from gracekv.evaluate.row_files import Row

# A method that equals FullKV has KL 0; the logarithm is clamped here (ours; float32 rounding alone
# causes about 1e-6).
_LEAST_KL = 1e-4
# A larger number is not a measurement, and its square would be infinite.
_LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a row.

    Attributes:
        name: its name on the command line.
        title: its title in tables.
        read: returns the value of a row, or None if it has none.
        higher: whether higher is better.
        digits: decimal places in tables.
    """

    name: str
    title: str
    read: Callable[[Row], float | None]
    higher: bool
    digits: int


def _number(*path: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    """A reader of the number at `path` of a row, times `scale`; None if there is none."""

    def read(row: Row) -> float | None:
        value: Any = row
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        # Rows store NaN and infinity as strings, so that no average includes them.
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return scale * float(value) if known and abs(value) <= _LARGEST else None

    return read


_percent = partial(_number, scale=100.0)


def _share(part: str, of: str, whole: str) -> Callable[[Row], float | None]:
    def read(row: Row) -> float | None:
        value, full = _number(part, of)(row), _number(part, whole)(row)
        return None if value is None or not full else 100.0 * value / full

    return read


def _log_kl(row: Row) -> float | None:
    # For several questions over one cache, the mean of their logarithms.
    each = [_number("fidelity", "kl")(part) for part in row.get("questions") or [row]]
    values = [kl for kl in each if kl is not None]
    if not values or len(values) < len(each):
        return None
    return sum(math.log(max(kl, _LEAST_KL)) for kl in values) / len(values)


_KEPT, _SIZE = _share("entries", "spent", "full"), _share("bytes", "kv", "full_kv")
_ALL = (
    Measure("score", "score x 100", _percent("score"), True, 1),
    Measure("kl", "KL to FullKV, nats", _number("fidelity", "kl"), False, 3),
    Measure("log_kl", "log KL to FullKV", _log_kl, False, 2),
    Measure("dnll", "NLL minus FullKV's, nats", _number("fidelity", "dnll"), False, 3),
    Measure("top1", "top-1 agreement with FullKV, %", _percent("fidelity", "top1"), True, 1),
    Measure("aoe", "attention output error, %", _percent("fidelity", "aoe"), False, 1),
    Measure("kv_share", "K and V bytes, % of a full cache (16 bits if quantised)", _SIZE, False, 1),
    Measure("entry_share", "context entries kept, %", _KEPT, False, 1),
    Measure("construction", "construction, s", _number("construction_seconds"), False, 2),
    Measure("ms_per_token", "ms per token", _number("ms_per_token"), False, 1),
)
MEASURES = {measure.name: measure for measure in _ALL}


def measure(name: str) -> Measure:
    """The measure of that name; `ConfigError` with the nearest name if there is none."""
    one_of("metric", name, MEASURES)
    return MEASURES[name]
