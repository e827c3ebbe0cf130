"""`PromptSpans`: the places of prefix, context, question and tail; and `Region`."""

from __future__ import annotations

from dataclasses import dataclass

from gracekv.errors import PromptError


@dataclass(frozen=True, slots=True)
class Region:
    """The compressible positions C = [start, end), absolute.

    Attributes:
        start: first token position.
        end: exclusive.
    """

    start: int
    end: int

    @property
    def length(self) -> int:
        """N (the paper's N_c), in tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Prefix [0, c_s) | context [c_s, c_e) | suffix [c_e, T); the question ends at q_e.

    Attributes:
        context_start: c_s, absolute token position.
        context_end: c_e, absolute token position, exclusive.
        question_end: q_e; [q_e, T) holds the chat template's tail and the answer prefix.
        length: T, in tokens.
        past: leading places of the prefix that were compressed before this sequence was read; they
            have keys and values, but no queries.

    Raises `PromptError` if the spans are empty, out of order or out of range.
    """

    context_start: int
    context_end: int
    question_end: int
    length: int
    past: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise PromptError(
                f"A prompt needs at least 2 tokens (the last one is fed again to start decoding); "
                f"got {self.length}."
            )
        if not 0 <= self.context_start < self.context_end <= self.length:
            raise PromptError(
                f"The context must be a non-empty span inside the prompt: 0 <= start < end <= "
                f"{self.length}; got ({self.context_start}, {self.context_end})."
            )
        if not 0 <= self.past <= self.context_start:
            raise PromptError(
                f"The part that was compressed before lies in the prefix: 0 <= past <= "
                f"{self.context_start}; got {self.past}."
            )
        if not self.context_end <= self.question_end <= self.length:
            raise PromptError(
                f"question_end must lie between the context's end and the prompt's end, "
                f"{self.context_end} <= question_end <= {self.length}; got {self.question_end}. "
                f"Leave it out if the prompt has no template tail."
            )

    @property
    def context_length(self) -> int:
        """N_ctx, in tokens."""
        return self.context_end - self.context_start

    def region(self, recent: int) -> Region:
        """C = [c_s, c_e - r), the context without a recent window of `recent` tokens."""
        return Region(self.context_start, max(self.context_start, self.context_end - recent))

    def last(self, count: int) -> range:
        """The last `count` positions of the prompt, or fewer if fewer were read."""
        return range(max(self.past, self.length - count), self.length)

    def direct_probes(self, question: int = 32, tail: int = 16) -> list[int]:
        """U: the last `question` question positions and the last `tail` positions, ascending.

        Raises `PromptError` if there are none.

        Source: the paper, "Direct relevance"; the union is a set, see departure 3.
        """
        last_question = range(
            max(self.context_end, self.question_end - question), self.question_end
        )
        probes = sorted({*last_question, *self.last(tail)})
        if not probes:
            raise PromptError(
                f"There are no probes among the last {question} question and {tail} tail positions "
                f"of the prompt. Set tail_probes >= 1, or mark the question's span in the prompt."
            )
        return probes

    def question_probes(self) -> list[int]:
        """U_q: the members of U inside the question, or all of U if there is no question."""
        probes = self.direct_probes()
        inside = [u for u in probes if self.context_end <= u < self.question_end]
        return inside or probes
