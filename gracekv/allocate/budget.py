"""`Budget`: how much to keep; `RecentWindow`: the tokens that are always kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypedDict

import torch

from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.plan import BudgetPlan
from gracekv.errors import BudgetError, ConfigError, expect, suggestion
from gracekv.registry import Configurable, bounded

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_ENTRY = EntryBytes(exact=1, coded=1, block=0, per_block=1, full=1)  # of a budget in entries

Number: TypeAlias = int | float | str | Fraction


class BudgetOptions(TypedDict, total=False):
    """The keywords for a budget; a call takes exactly one of them.

    Attributes:
        budget: a `Budget`, as for `Pipeline.run`.
        ratio: how many times fewer entries the context keeps, at least 1; if the pipeline quantises
            them, how many times fewer bytes than a full cache of 16-bit numbers.
        entries_per_head: entries per KV head and layer on average.
        kv_bytes: bytes of the context's keys and values, including scales and zero points, or text
            such as "64MiB".
        compression_ratio: the fraction of entries removed, at least 0 and below 1, as in kvpress:
            0.875 is ratio=8.
    """

    budget: Budget | None
    ratio: Number | None
    entries_per_head: int | None
    kv_bytes: int | str | None
    compression_ratio: Number | None


@dataclass(frozen=True, slots=True)
class RecentWindow(Configurable):
    """The last context tokens, kept exactly in every head and counted in the budget.

    Attributes:
        size: r in tokens, the paper's 32.
        minimum: r never shrinks below this many tokens, the paper's 4.
        share: r takes at most this share of the budget (ours; 1.0 is the paper).
        rule: "fixed" is the above. "half": r is half of a head's equal share, at least 1,
            regardless of the other fields (H2O's published split); a budget must still hold
            `minimum` tokens of each head.
    """

    size: int = bounded(32, at_least=0)
    minimum: int = bounded(4, at_least=0)
    share: float = bounded(1.0, above=0, at_most=1, hint="1.0 is the paper's window.")
    rule: Literal["fixed", "half"] = "fixed"

    def check(self) -> None:
        if self.minimum > self.size:
            raise ConfigError(
                f"RecentWindow.minimum must not exceed size; got {self.minimum} and {self.size}."
            )

    def tokens(self, size: int, heads: int, each: int = 1) -> int:
        """The window r of each of `heads` heads for a budget of `size`; an entry takes `each`."""
        if self.rule == "half":
            return max(1, size // heads // 2 // each)
        share = math.floor(Fraction(str(self.share)) * size / heads / each)
        return max(self.minimum, min(self.size, share))


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the context's cache may stay: by ratio, entries per head, or bytes of K/V.

    Build it with `Budget.ratio`, `Budget.compression_ratio`, `Budget.entries_per_head` or
    `Budget.kv_bytes`.

    Attributes:
        kind: "ratio", "entries_per_head" or "kv_bytes".
        amount: the ratio, the entries per head, or the bytes; exact.
    """

    kind: str
    amount: Fraction

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        takes: Iterable[str] = tuple(BudgetOptions.__annotations__),
        others: Mapping[str, str] | None = None,
    ) -> Budget:
        """The one budget that is not None among the `options` of a call.

        Args:
            options: values by keyword.
            takes: the keywords of `BudgetOptions` that the call accepts.
            others: further keywords that a mistyped one may mean, and what to write for each.

        Raises `BudgetError` if there is none or several, and for unknown keywords.
        """
        names = ", ".join(takes)
        for name in set(options).difference(takes):
            near = suggestion(name, {**{x: x for x in takes}, **(others or {})})
            raise BudgetError(f"There is no argument {name!r}.{near} A budget is one of {names}.")
        values = {name: value for name, value in options.items() if value is not None}
        if len(values) != 1:
            raise BudgetError(
                f"Give exactly one budget: {names}; got {' and '.join(values) or 'none'}. For "
                f"example ratio=8 keeps an eighth of the context."
            )
        ((name, value),) = values.items()
        if name == "budget":
            expect(value, Budget, "budget takes a gracekv.Budget, as Budget.ratio(8)", BudgetError)
        budget: Budget = value if name == "budget" else getattr(cls, name)(value)
        return budget

    @classmethod
    def ratio(cls, ratio: Number) -> Budget:
        """x >= 1: the context keeps floor(L G N_ctx / x) entries (paper, Eq. (A1)).

        Raises `BudgetError` for a smaller ratio or anything but a number.
        """
        if (amount := _rational(ratio, "ratio")) < 1:
            hint = ""
            if amount >= 0.001:
                hint = (
                    f" If {ratio} is the share to keep, use ratio={float(1 / amount):.6g}; if it "
                    f"is the share to remove, use compression_ratio={ratio}."
                )
            raise BudgetError(
                f"ratio says how many times fewer entries to keep and must be at least 1 (1 keeps "
                f"all, 8 keeps an eighth); got {ratio!r}.{hint}"
            )
        return cls("ratio", amount)

    @classmethod
    def compression_ratio(cls, removed: Number) -> Budget:
        """The share of the context's entries to remove, from 0 to below 1, as in kvpress.

        0.875 removes seven of eight entries, like `Budget.ratio(8)`. Raises `BudgetError` for a
        share outside [0, 1) or anything but a number.
        """
        amount = _rational(removed, "compression_ratio")
        if not 0 <= amount < 1:
            raise BudgetError(
                f"compression_ratio is the share of entries to remove, from 0 to below 1 (0.875 "
                f"keeps an eighth); got {removed!r}. To say how many times fewer entries to keep, "
                f"use ratio."
            )
        return cls("ratio", 1 / (1 - amount))

    @classmethod
    def entries_per_head(cls, entries: int | Integral) -> Budget:
        """L G `entries` entries for the context in total, distributed by the allocator.

        Raises `BudgetError` unless it is a positive integer.
        """
        if isinstance(entries, bool) or not isinstance(entries, Integral) or entries < 1:
            raise BudgetError(f"entries_per_head is a positive whole number; got {entries!r}.")
        return cls("entries_per_head", Fraction(int(entries)))

    @classmethod
    def kv_bytes(cls, size: int | str) -> Budget:
        """Bytes of the context's keys and values, a number or text such as "64MiB" (ours).

        Raises `BudgetError` for an unknown unit or a size that is not positive.
        """
        if isinstance(size, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", size.strip())
            if not match or match[2].lower() not in _UNITS:
                raise BudgetError(
                    f"kv_bytes takes a number of bytes or a size such as '64MiB', '1.5GB' "
                    f"(units: B, kB, MB, GB, KiB, MiB, GiB); got {size!r}."
                )
            amount = _rational(match[1], "kv_bytes") * _UNITS[match[2].lower()]
        else:
            amount = _rational(size, "kv_bytes")
        if amount <= 0:
            raise BudgetError(f"kv_bytes must be positive; got {size!r}.")
        return cls("kv_bytes", amount)

    def plan(
        self,
        *,
        layers: int,
        heads: int,
        context: int,
        entry_bytes: int,
        window: RecentWindow | None = None,
        costs: EntryBytes | None = None,
    ) -> BudgetPlan:
        """Convert the budget to entries; needs the model's shape but no prefill.

        Args:
            layers: L.
            heads: G.
            context: N_ctx, tokens.
            entry_bytes: bytes of one K/V pair.
            window: the recent window's rule.
            costs: bytes of entries if some are quantised; ratios then compare bytes with a full
                cache of 16-bit numbers. None if no entry is quantised.

        Raises `BudgetError` if not even the shortest recent window fits; the message names the
        largest ratio that works.
        """
        window, units = window or RecentWindow(), layers * heads
        full, in_bytes = units * context, costs is not None and self.kind != "entries_per_head"
        if costs is None or not in_bytes:
            costs = _ENTRY
        if self.kind == "ratio":
            size = math.floor(full * costs.full / self.amount)
        elif self.kind == "entries_per_head":
            size = units * int(self.amount)
        else:
            size = math.floor(self.amount if in_bytes else self.amount / entry_bytes)
        size = size if in_bytes else min(size, full)
        # A context shorter than the recent window needs only its own length.
        minimum = min(max(window.minimum, window.rule == "half"), context)
        least = units * (minimum * costs.exact or costs.coded + costs.block)
        if size < least:
            largest = math.floor(Fraction(full * costs.full, least) * 100) / 100
            hint = f"kv_bytes of at least {least if in_bytes else least * entry_bytes}"
            if not in_bytes:
                hint = f"entries_per_head of at least {least // units}, or {hint}"
            if largest >= 1:
                hint = f"a ratio of at most {largest:.10g}, or {hint}"
            raise BudgetError(
                f"A budget of {size:,} {'bytes' if in_bytes else 'entries'} is below the smallest "
                f"that works here, {least:,} ({minimum} recent tokens, or one entry, in each of "
                f"{layers} x {heads} KV heads). Use {hint}."
            )
        recent = min(window.tokens(size, units, costs.exact), context)
        room, rest = size - units * recent * costs.exact, context - recent
        stay, total = min(costs.sinks, rest), full
        # A block of few entries takes more bytes quantised than exact.
        coded = costs.heads(stay, torch.tensor([rest - stay]))
        if units * min(coded, rest * costs.exact) > room:
            total = min(units * recent + costs.most(room), full - 1)
        return BudgetPlan(layers, heads, context, total, recent, size if in_bytes else None)


def _rational(value: object, name: str) -> Fraction:
    """The exact value as written: 0.1 is 1/10, not the nearest double."""
    if isinstance(value, Fraction):
        return value
    try:
        if isinstance(value, bool) or not isinstance(value, Real | str):
            raise ValueError("type")
        # Fraction("1e999999999") would compute that power of ten.
        if re.search(r"e[+-]?[\d_]{4}", str(value), re.IGNORECASE):
            raise ValueError("exponent")
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        said = f"{value!r} ({type(value).__name__})"
        raise BudgetError(f"{name} must be a finite number such as 8; got {said}.") from error
