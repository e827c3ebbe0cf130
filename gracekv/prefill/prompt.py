"""`Prompt`, the token ids, and `PromptSpans`, the places of prefix, context, question and tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import PromptError
from gracekv.prefill.chat_text import (
    check_question,
    check_text,
    checked_ids,
    continued,
    encode,
    has_chat_template,
    question_end,
    render,
)


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


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One sequence, ready for prefill. Build it with `from_chat` or `from_ids`.

    Attributes:
        ids: int64 [T] on the CPU.
        spans: prefix, context, question and tail, in tokens.
        parts: the texts of prefix, context, question and tail, which join to the rendered prompt;
            None if the prompt was made from ids.
        tokenizer: the tokenizer that made the ids, for decoding; or None.
        separator: text between the context and a question that is asked later.
        template: whether the tokenizer's chat format is used, if it has one.

    Raises:
        PromptError: the ids are not one sequence of `spans.length` tokens.
    """

    ids: Tensor
    spans: PromptSpans
    parts: tuple[str, str, str, str] | None = None
    tokenizer: Any = None
    separator: str = "\n\n"
    template: bool = True

    def __post_init__(self) -> None:
        if self.ids.shape != (self.spans.length,) or self.ids.dtype != torch.int64:
            raise PromptError(
                f"Prompt.ids must be int64 of shape [{self.spans.length}], one sequence; got "
                f"{self.ids.dtype} of shape {list(self.ids.shape)}. Use Prompt.from_ids."
            )

    @classmethod
    def from_ids(
        cls,
        ids: Tensor | Sequence[int],
        context: tuple[int, int],
        question_end: int | None = None,
        tokenizer: Any = None,
    ) -> Prompt:
        """Make a prompt from token ids.

        Args:
            ids: [T] whole numbers, or [1, T] as transformers' tokenizers return them; one sequence
                without padding.
            context: (start, end) of the compressible context, absolute, end exclusive.
            question_end: end of the question, where the template's tail starts; default T.
            tokenizer: for decoding.

        Raises `PromptError` if ids or spans cannot be used.
        """
        checked = checked_ids(ids)
        if (
            not isinstance(context, tuple | list)
            or len(context) != 2
            or not all(isinstance(x, int) and not isinstance(x, bool) for x in context)
        ):
            raise PromptError(
                f"context takes two token positions, (start, end) with the end exclusive; got "
                f"{context!r}."
            )
        start, end = context
        length = len(checked)
        spans = PromptSpans(start, end, length if question_end is None else question_end, length)
        return cls(checked, spans, tokenizer=tokenizer)

    @classmethod
    def from_chat(
        cls,
        tokenizer: Any,
        *,
        context: str,
        question: str = "",
        instruction: str = "",
        answer_prefix: str = "",
        separator: str = "\n\n",
        template: bool = True,
    ) -> Prompt:
        """Make a prompt from texts, in the tokenizer's chat format if it has one.

        The user's message is instruction, context and question, joined by `separator`; the
        assistant's turn starts with `answer_prefix`. Without a chat template the same text is used
        as it is. A fast tokenizer encodes the whole text at once, so the ids do not depend on the
        split; a slow one, which returns no offsets, encodes the four parts one by one (ours).

        Args:
            tokenizer: a Hugging Face tokenizer.
            context: the long text, the only part that is compressed.
            question: "" if there is none; a blank one is refused.
            instruction: text before the context; never compressed.
            answer_prefix: given start of the model's answer.
            separator: inserted between texts that are not empty; "" if they bring their own.
            template: False leaves out the chat format, as benchmarks of base models require.

        Raises `PromptError` if the context is empty, the question blank, a text not valid Unicode,
        or if the chat template changes the texts.
        """
        texts = {
            "context": context,
            "question": question,
            "instruction": instruction,
            "answer_prefix": answer_prefix,
            "separator": separator,
        }
        for name, text in texts.items():
            check_text(name, text)
        if question:
            check_question(question)
        if not context.strip():
            raise PromptError(
                "The context is empty: there is nothing to compress. Pass the long text as "
                "context=, and the task as instruction= or question=."
            )
        if not callable(tokenizer):
            raise PromptError(
                f"Prompt.from_chat takes a Hugging Face tokenizer; got "
                f"{type(tokenizer).__name__}. For token ids use Prompt.from_ids."
            )
        chat = template and has_chat_template(tokenizer)
        before, after = render(tokenizer, instruction, question, separator, chat)
        question_chars = question_end(after, question)
        parts = (before, context, after[:question_chars], after[question_chars:] + answer_prefix)
        ids, borders = encode(tokenizer, parts, special=not chat)
        start, end, last = borders
        spans = PromptSpans(start, end, last, len(ids))
        return cls(
            torch.tensor(ids, dtype=torch.int64), spans, parts, tokenizer, separator, template
        )

    @property
    def has_question(self) -> bool:
        """Whether the context is followed by more than the chat template's tail."""
        return self.spans.question_end > self.spans.context_end

    def extended(self, passage: str | Tensor | Sequence[int]) -> Prompt:
        """Insert `passage` at the end of the context.

        Args:
            passage: text, which is encoded as a continuation and added as it is; or token ids, [n]
                or [1, n].

        Raises `PromptError` if the passage is empty or cannot be encoded, or if the prompt has a
        question.
        """
        if self.has_question:
            raise PromptError(
                "This prompt has a question of its own, so its context cannot be extended. "
                "Compress a prompt without one: Prompt.from_chat(tokenizer, context=text)."
            )
        if isinstance(passage, str) and self.tokenizer is None:
            raise PromptError(
                "A passage of text needs a tokenizer, and this prompt has none. Pass token ids, or "
                "pass a tokenizer to Prompt.from_ids or gracekv.load."
            )
        if isinstance(passage, str):
            check_text("passage", passage)
            new = torch.tensor(continued(self.tokenizer, passage), dtype=torch.int64)
        else:
            new = checked_ids(passage)
        if not len(new):
            raise PromptError("The passage is empty: there is nothing to read.")
        spans, end = self.spans, self.spans.context_end
        moved = (x + len(new) for x in (end, spans.question_end, spans.length))
        ids = torch.cat([self.ids[:end], new, self.ids[end:]])
        return replace(self, ids=ids, spans=PromptSpans(spans.context_start, *moved), parts=None)

    def without_tail(self) -> Prompt:
        """The part that a prefill reads: without a question, up to one token after the context.

        A later question takes the place of the template's tail. One token after the context stays,
        since the last token of a prompt has no entry. With a question, or if the prompt ends with
        the context, this is the prompt itself.
        """
        end = self.spans.context_end + 1
        if self.has_question or end >= self.spans.length:
            return self
        spans = PromptSpans(self.spans.context_start, end - 1, end - 1, end)
        return replace(self, ids=self.ids[:end], spans=spans, parts=None)
