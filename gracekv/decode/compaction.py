"""`Compaction`: when a conversation compresses its older messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from gracekv.errors import ConfigError, suggestion
from gracekv.prefill.chat_text import ROLES
from gracekv.registry import Configurable, bounded

# Shorter runs of messages are not worth compressing. Source: ours.
_SHORT = 32


@dataclass(frozen=True, kw_only=True)
class Compaction(Configurable):
    """When a conversation compresses its older messages, and which messages it keeps whole.

        book.chat(compact=gracekv.Compaction(after=1024, ratio=4))

    Attributes:
        after: compress when the uncompressed messages have more tokens than this.
        ratio: tokens per kept entry in compressed messages; at least 8 entries stay per head, on
            average.
        recent: number of the last messages that stay uncompressed.
        keep: messages that keep all their entries, by role ("system", "developer", "user",
            "assistant" or "tool") or by 0-based index in the conversation's `messages`.
    """

    after: int = bounded(1024, at_least=_SHORT)
    ratio: float = bounded(4.0, at_least=1)
    recent: int = bounded(2, at_least=0)
    keep: tuple[str | int, ...] = ()

    def check(self) -> None:
        for one in self.keep:
            if one not in ROLES and (type(one) is not int or one < 0):
                raise ConfigError(
                    f"Compaction.keep takes roles ({', '.join(ROLES)}) and indices of messages, "
                    f"from 0; got {one!r}.{suggestion(str(one), ROLES)}"
                )

    def runs(
        self, tail: Sequence[tuple[str, int]], first: int, least: int = 8, failed: int = 0
    ) -> list[tuple[int, float]]:
        """The oldest messages to compress now, as runs of (tokens, ratio); empty if none are due.

        Args:
            tail: role and number of tokens of each uncompressed message.
            first: index of the first of them in the conversation.
            least: minimum entries per head that a run keeps, on average.
            failed: tokens of the tail when compressing them last failed; it waits for `after` more.
        """
        if sum(tokens for _, tokens in tail) - failed <= self.after:
            return []
        runs = _joined(
            (tokens, 1.0 if role in self.keep or number in self.keep else self.ratio)
            for number, (role, tokens) in enumerate(tail[: max(0, len(tail) - self.recent)], first)
            if tokens
        )
        if runs and runs[-1][1] != 1 and runs[-1][0] < _SHORT:
            # It waits for later messages.
            runs.pop()
        sizes = ((n, 1.0 if n < _SHORT else min(ratio, n / least)) for n, ratio in runs)
        return _joined((n, max(1.0, ratio)) for n, ratio in sizes)


def _joined(runs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Runs of (tokens, ratio) in which neighbours differ in their ratio."""
    groups = groupby(runs, key=itemgetter(1))
    return [(sum(tokens for tokens, _ in same), ratio) for ratio, same in groups]
