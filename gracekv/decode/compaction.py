"""`Compaction`: when a conversation compresses its older messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gracekv.registry import Configurable, bounded

# Shorter runs of messages are not worth compressing. Source: ours.
_SHORT = 32


@dataclass(frozen=True, kw_only=True)
class Compaction(Configurable):
    """When a conversation compresses its older messages, and which messages it keeps whole.

        book.chat(compact=gracekv.Compaction(after=1024, ratio=4))

    Attributes:
        after: compress when the uncompressed messages have more tokens than this.
        ratio: tokens per entry kept in compressed messages.
        recent: number of the last messages that stay uncompressed.
        keep: messages that keep all their entries, by role ("user", "assistant") or by index in
            the conversation's `messages`.
    """

    after: int = bounded(1024, at_least=_SHORT)
    ratio: float = bounded(4.0, at_least=1)
    recent: int = bounded(2, at_least=0)
    keep: tuple[str | int, ...] = ()

    def runs(self, tail: Sequence[tuple[str, int]], first: int) -> list[tuple[int, float]]:
        """The oldest messages to compress now, as runs of (tokens, ratio); [] if none are due.

        Args:
            tail: role and number of tokens of each uncompressed message.
            first: index of the first of them in the conversation.
        """
        if sum(tokens for _, tokens in tail) <= self.after:
            return []
        runs: list[tuple[int, float]] = []
        for number, (role, tokens) in enumerate(tail[: max(0, len(tail) - self.recent)], first):
            whole = role in self.keep or number in self.keep
            _append(runs, tokens, 1.0 if whole else self.ratio)
        merged: list[tuple[int, float]] = []
        for tokens, ratio in runs:
            _append(merged, tokens, 1.0 if tokens < _SHORT else ratio)
        return merged


def _append(runs: list[tuple[int, float]], tokens: int, ratio: float) -> None:
    """Add tokens to the last run, or a run of another ratio after it."""
    if runs and runs[-1][1] == ratio:
        tokens += runs.pop()[0]
    runs.append((tokens, ratio))
