"""`token_statuses`: the state of one token in every layer and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from gracekv.errors import ReportError, expect, one_of
from gracekv.report.entries import Result, check_result, result_entries

# The columns of `KeptEntries` that `TokenStatus` shows.
_COLUMNS = ("start", "end", "multiplicity", "depth", "floor", "value_change", "bits")


@dataclass(frozen=True, slots=True)
class TokenStatus:
    """A token in one head.

    Attributes:
        layer: the layer's number in the model.
        head: KV head.
        state: "exact" (it has its own entry, in `bits`), "merged" or "dropped".
        start: first absolute position of the entry that holds it; -1 if it was dropped.
        end: end of the entry's positions, exclusive; -1 if it was dropped.
        multiplicity: the entry's weight in attention, in tokens; 0.0 if dropped.
        depth: level of the entry's node in its tree; -1 outside of trees, or unknown.
        floor: whether the floor bought the entry; None if unknown.
        relevance: the token's relevance in this head, to about 3 %; None outside of the trees, or
            if unknown.
        value_change: how much the fit changed the entry's value, relative to its norm; None if
            nothing was fitted, or if unknown.
        bits: bits per number of the entry's key and value; None if dropped or outside the context,
            or if the cache is not quantised.
    """

    layer: int
    head: int
    state: str
    start: int
    end: int
    multiplicity: float
    depth: int
    floor: bool | None = None
    relevance: float | None = None
    value_change: float | None = None
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class TokenStatuses:
    """A token in all heads; iterate over its L*G rows, or print it as a table.

    Attributes:
        position: the token's absolute position.
        rows: one status per head, by layer, then head.
    """

    position: int
    rows: tuple[TokenStatus, ...]

    def __iter__(self) -> Iterator[TokenStatus]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, state: str) -> int:
        """The number of heads in which the token is "exact", "merged" or "dropped".

        Raises `ReportError` for another state.
        """
        one_of("state", state, ("exact", "merged", "dropped"), ReportError)
        return sum(row.state == state for row in self.rows)

    def __str__(self) -> str:
        lines = [
            f"token {self.position}: exact in {self.count('exact')} heads, merged in "
            f"{self.count('merged')}, dropped in {self.count('dropped')}",
            "layer head state              entry  weight relevance bits",
        ]
        for row in self.rows:
            entry = "–" if row.end < 0 else f"[{row.start}, {row.end})"
            relevance = "–" if row.relevance is None else f"{row.relevance:.2e}"
            place = f"{row.layer:>5} {row.head:>4} {row.state:<8} {entry:>15}"
            lines.append(f"{place} {row.multiplicity:>7.2f} {relevance:>9} {row.bits or '–':>4}")
        return "\n".join(lines)


def token_statuses(result: Result, position: int) -> TokenStatuses:
    """Look up the entry of each head that stands for the prompt token at `position`.

        print(gracekv.report.token_statuses(result, 203))

    Tokens of prefix and suffix are exact in every head; so is the last prompt token, which is not
    in the cache but fed again. Negative positions count from the prompt's end.

    Raises `ReportError` if there is no such token, or as `result_entries` does.
    """
    check_result(result)
    expect(position, SupportsIndex, "A position is a token's number", ReportError)
    spans, run = result.prompt.spans, result.run
    given, position = position, position + spans.length if position < 0 else position
    if not 0 <= position < spans.length:
        raise ReportError(
            f"The prompt has the tokens 0 to {spans.length - 1}; got {given}. Negative positions "
            f"count from the end."
        )
    entries = result_entries(result)
    first, last = entries.region
    holder = torch.full((entries.layers * entries.heads,), -2, device="cpu")
    if first <= position < last:
        holder = entries.entry_of_token(position)
    record, relevance, numbers = run.recorded(), None, run.cache.model_layers
    if record is not None and record.region[0] <= position < record.region[1]:
        relevance = record.relevance.at(position - record.region[0]).flatten()
    columns, rows = {name: getattr(entries, name) for name in _COLUMNS}, []
    for unit, entry in enumerate(holder.tolist()):
        facts: dict[str, Any] = {"start": -1, "end": -1, "multiplicity": 0.0, "depth": -1}
        if entry == -2:
            facts |= {"start": position, "end": position + 1, "multiplicity": 1.0}
        elif entry >= 0:
            facts |= {name: x[entry].item() for name, x in columns.items() if x is not None}
        merged = facts["end"] - facts["start"] > 1
        state = "dropped" if entry == -1 else "merged" if merged else "exact"
        layer, head = numbers[unit // entries.heads], unit % entries.heads
        score = None if relevance is None else float(relevance[unit])
        rows.append(TokenStatus(layer, head, state, relevance=score, **facts))
    return TokenStatuses(position, tuple(rows))
