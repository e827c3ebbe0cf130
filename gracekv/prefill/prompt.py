"""`Prompt`: token ids, and the positions of prefix, context, question and tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import EditedHistoryError, PromptError, expect
from gracekv.prefill.chat_text import (
    Message,
    check_question,
    check_text,
    continued,
    encode,
    has_chat_template,
    render,
    with_date,
)
from gracekv.prefill.messages import encoded_messages, plain_messages
from gracekv.prefill.spans import PromptSpans


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Prompt:
    """One sequence, ready for prefill. Build it with `from_chat` or `from_ids`.

    Attributes:
        ids: int64 [T] on the CPU.
        spans: prefix, context, question and tail, in tokens.
        parts: the texts of prefix, context, question and tail, which concatenate to the rendered
            prompt; None if the prompt was made from ids.
        tokenizer: the tokenizer that made the ids, for decoding; or None.
        separator: text between the context and a later question.
        template: whether the tokenizer's chat format is used, if it has one.
        messages: how many whole messages the context consists of; 0 if it is part of one.
        day: the ISO date that was today's for the template of these messages, else None.
        tail: int64 [n], the ids after the question if `ids` end before them, else None.

    Raises:
        PromptError: the ids are not one sequence of `spans.length` tokens.
    """

    ids: Tensor = field(repr=False)
    spans: PromptSpans
    parts: tuple[str, str, str, str] | None = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    separator: str = "\n\n"
    template: bool = True
    messages: int = 0
    tail: Tensor | None = field(default=None, repr=False)
    day: str | None = None

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
            ids: [T] integers, or [1, T] as transformers' tokenizers return them; one sequence
                without padding.
            context: (start, end) of the compressible context, absolute, end exclusive.
            question_end: end of the question, where the template's tail starts; by default T.
            tokenizer: for decoding.

        Raises `PromptError` if ids or spans are invalid.
        """
        checked = checked_ids(ids)
        if not isinstance(context, tuple | list) or [type(x) for x in context] != [int, int]:
            raise PromptError(
                f"context takes two token positions, (start, end) with the end exclusive; got "
                f"{context!r}."
            )
        start, end = context
        expect(question_end, int | None, "question_end takes a token position", PromptError)
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
        unchanged. A fast tokenizer encodes the whole text at once, so the ids do not depend on the
        split; a slow one, which returns no offsets, encodes the four parts one by one (ours).

        Args:
            tokenizer: a Hugging Face tokenizer.
            context: the long text, the only part that is compressed.
            question: "" if there is none; blank text is rejected.
            instruction: text before the context; never compressed.
            answer_prefix: start of the model's answer.
            separator: inserted between non-empty texts; "" if they have their own.
            template: False disables the chat format, as benchmarks of base models require.

        Raises `PromptError` if the context is empty, the question blank, a text not valid Unicode,
        or if the chat template changes the texts.
        """
        texts = {"context": context, "question": question, "instruction": instruction}
        texts |= {"answer_prefix": answer_prefix, "separator": separator}
        for name, text in texts.items():
            check_text(name, text)
        expect(template, bool, "template is True or False", PromptError)
        if question:
            check_question(question)
        if not context.strip():
            raise PromptError(
                "The context is empty: there is nothing to compress. Pass the long text as "
                "context=, and the task as instruction= or question=."
            )
        takes = "Prompt.from_chat takes a Hugging Face tokenizer (for token ids: Prompt.from_ids)"
        expect(tokenizer, Callable, takes, PromptError)
        chat = template and has_chat_template(tokenizer)
        before, after = render(tokenizer, instruction, question, separator, chat)
        question_chars = _question_end(after, question)
        parts = (before, context, after[:question_chars], after[question_chars:] + answer_prefix)
        ids, (start, end, last) = encode(tokenizer, parts, special=not chat)
        spans = PromptSpans(start, end, last, len(ids))
        return cls(checked_ids(ids), spans, parts, tokenizer, separator, template)

    @classmethod
    def from_messages(
        cls,
        tokenizer: Any,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        day: str | None = None,
    ) -> Prompt:
        """Make a prompt whose context is the first messages of a conversation.

            prompt = gracekv.Prompt.from_messages(tokenizer, messages, tools=tools)
            chat = gracekv.compress(model, prompt, ratio=1).chat()
            answer = chat.send(messages, tools=tools)

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            messages: in OpenAI's format, for example a system prompt and the first question.
            tools: tool definitions, which the template puts where the model expects them.
            day: the ISO date that a template with a date shows; default: today.

        Raises `PromptError` if there is no message or no chat template, or if a message has no text
        or a mistyped role.
        """
        if not messages or not has_chat_template(tokenizer):
            raise PromptError("Give at least one message, and a tokenizer with a chat template.")
        day, known = day or date.today().isoformat(), plain_messages(messages)
        context, ids = encoded_messages(with_date(tokenizer, day), known, tools)
        spans = PromptSpans(0, context, context, len(ids))
        return cls(checked_ids(ids), spans, None, tokenizer, messages=len(messages), day=day)

    @property
    def has_question(self) -> bool:
        """Whether anything but the chat template's tail follows the context."""
        return self.spans.question_end > self.spans.context_end

    def extended(self, passage: str | Tensor | Sequence[int]) -> Prompt:
        """Insert `passage` at the end of the context.

        Args:
            passage: text, which is encoded as a continuation and added unchanged; or token ids, [n]
                or [1, n].

        Raises `PromptError` if the passage is empty or cannot be encoded, or if the prompt has a
        question.
        """
        if self.has_question:
            raise PromptError(
                "This prompt has a question of its own, so its context cannot be extended. "
                "Compress a prompt without a question: Prompt.from_chat(tokenizer, context=text)."
            )
        if isinstance(passage, str) and self.tokenizer is None:
            raise PromptError(
                "A passage of text needs a tokenizer, but this prompt has none. Pass token ids, or "
                "pass a tokenizer to Prompt.from_ids or gracekv.load."
            )
        if isinstance(passage, str):
            check_text("passage", passage)
            passage = continued(self.tokenizer, passage)
        if not len(new := checked_ids(passage)):
            raise PromptError("The passage is empty: there is nothing to read.")
        spans, end = self.spans, self.spans.context_end
        moved = (x + len(new) for x in (end, spans.question_end, spans.length))
        ids = torch.cat([self.ids[:end], new, self.ids[end:]])
        return replace(self, ids=ids, spans=PromptSpans(spans.context_start, *moved), parts=None)

    def without_tail(self) -> Prompt:
        """The part that a prefill reads: without a question, up to one token after the context.

        A later question replaces the template's tail. One token after the context stays, since the
        last token of a prompt has no entry. With a question, or if the prompt ends with the
        context, this is the prompt itself.
        """
        end = self.spans.context_end + 1
        if end <= self.spans.question_end or end >= self.spans.length:
            return self
        spans = PromptSpans(self.spans.context_start, end - 1, end - 1, end)
        tail = self.ids[self.spans.question_end :] if self.tail is None else self.tail
        return replace(self, ids=self.ids[:end], spans=spans, parts=None, tail=tail)


def check_begins(prompt: Prompt, messages: Any, tools: Sequence[Any] | None) -> None:
    """Raise `EditedHistoryError` unless the context began with these messages and tools."""
    given = plain_messages(messages)[: prompt.messages]
    begun = Prompt.from_messages(prompt.tokenizer, given, tools=tools, day=prompt.day)
    context, end = prompt.ids[: prompt.spans.context_end], begun.spans.context_end
    if not torch.equal(begun.ids[:end], context[:end]):  # passages may follow
        raise EditedHistoryError(
            f"The first {prompt.messages} messages or tools are not those of the context. Send "
            f"them unchanged, or compress a new context: Prompt.from_messages(tokenizer, messages)."
        )


def checked_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Convert ids [T] or [1, T] to int64 [T] on the CPU.

    Raises `PromptError` unless they are ids of one sequence.
    """
    try:
        tensor = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"ids must be token ids of one sequence, [T] ({error}).") from error
    if tensor.ndim == 2 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise PromptError(
            f"ids must be one sequence of shape [T] or [1, T]; got {list(tensor.shape)}. Compress "
            f"the sequences of a batch one by one: Prompt.from_ids(ids[0], ...)."
        )
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    if len(tensor) and (tensor.dtype not in kinds or int(tensor.min()) < 0):
        raise PromptError(
            f"Token ids must be whole numbers of at least 0; got {tensor.dtype}, {tensor.min()} "
            f"among them. Remove padding and label masks (-100) first."
        )
    # A copy: the caller may fill the same memory again.
    return tensor.detach().to(torch.int64, copy=True)


def _question_end(after: str, question: str) -> int:
    """The offset in `after` at which the question ends; raises `PromptError` if it is not found."""
    if not (text := question.strip()):
        return 0
    if (at := after.find(text)) < 0:
        raise PromptError(
            "The chat template changes the question's text, so its end cannot be found. Render "
            "the prompt yourself and use Prompt.from_ids."
        )
    return at + len(text)
