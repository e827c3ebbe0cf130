"""`Limit`: how much a cache may hold during generation; `CutHistory`: which tokens cuts kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from torch import Tensor

from gracekv.allocate.budget import Budget, Number
from gracekv.decode.base import DECODERS, Decoder
from gracekv.errors import BudgetError
from gracekv.registry import Configurable, bounded


@dataclass(frozen=True, kw_only=True)
class Limit(Configurable):
    """How much a cache may hold during generation; give exactly one of three sizes.

        result.generate(max_new_tokens=4096, limit=gracekv.Limit(entries_per_head=512))

    The limit applies to each row of a batch separately.

    Attributes:
        entries_per_head: entries that a cut leaves per KV head and layer, on average; up to `every`
            more are added before the next cut.
        ratio: a cut leaves this many times fewer entries than tokens read and written so far.
        kv_bytes: maximum bytes of keys and values at any time; a number or text such as "64MiB".
        every: tokens between two cuts.
        window: how many of the last tokens every head keeps.
        strategy: chooses the entries that stay: a strategy of the stage `decode`, its name, or None
            for the pipeline's ("fitted" if that is "none").
        positions: "counted" keeps the positions of all tokens that were read. "closed" re-rotates
            older keys to close the gaps of dropped tokens when positions would exceed the model's
            trained length, so that no distance does.
        history: whether the cache records the tokens and which of them each cut kept, for
            `result.report(cache=cache)`; 4 bytes per token and cut, for a single row.
    """

    own_checks = ("entries_per_head", "ratio", "kv_bytes")

    entries_per_head: int | Integral | None = None
    ratio: Number | None = None
    kv_bytes: int | str | None = None
    every: int = bounded(256, at_least=1, hint="Cuts of 64 to 512 tokens are usual.")
    window: int = bounded(32, at_least=1)
    strategy: Decoder | str | None = None
    positions: Literal["counted", "closed"] = "counted"
    history: bool = False

    def check(self) -> None:
        _ = self.budget
        if self.strategy is not None:
            DECODERS.parse(self.strategy)

    @property
    def budget(self) -> Budget:
        """The size as a `Budget`; raises `BudgetError` unless exactly one size is given."""
        names = ("entries_per_head", "ratio", "kv_bytes")
        sizes = {name: size for name in names if (size := getattr(self, name)) is not None}
        if len(sizes) != 1:
            raise BudgetError(
                f"Give Limit exactly one of {', '.join(names)}; got {', '.join(sizes) or 'none'}."
            )
        return Budget.of(sizes)

    def decoder(self, default: Decoder) -> Decoder:
        """The strategy to use; `default` is the pipeline's."""
        if self.strategy is not None:
            return DECODERS.parse(self.strategy)
        return DECODERS.build("fitted") if default.name == "none" else default

    def target(self, length: int, units: int, entry_bytes: int) -> int:
        """The number of entries that a cut leaves in all heads after `length` tokens.

        Args:
            length: tokens read and written.
            units: L G.
            entry_bytes: bytes of one K/V pair.
        """
        budget = self.budget
        if budget.kind == "kv_bytes":
            return math.floor(budget.amount / entry_bytes) - units * self.every
        if budget.kind == "ratio":
            return units * math.floor(length / budget.amount)
        return units * int(budget.amount)


@dataclass(frozen=True, slots=True, eq=False)
class CutHistory:
    """The tokens that a limited cache read after its packed prompt, and which its cuts kept.

    All tensors but `keys` are on the CPU.

    Attributes:
        first: position of the first token of `ids`, which is the prompt's last one, fed again.
        ids: int64 [n] tokens read since; -1 for those given as embeddings.
        held: for each cut int32 [tokens so far], in how many heads of all layers each token has its
            own entry.
        keys: [E, d] of the last layer's entries at the start, which depend on the whole prompt and
            so identify the result; None if unknown.
    """

    first: int
    ids: Tensor
    held: tuple[Tensor, ...]
    keys: Tensor | None = None
