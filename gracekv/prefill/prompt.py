"""`Prompt`: token ids with the spans of prefix, context, question and template tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import PromptError
from gracekv.prefill.spans import PromptSpans


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One sequence, ready for prefill. Build it by `from_chat` or `from_ids`.

    Attributes:
        ids: int64 [T] on the CPU.
        spans: prefix, context, question and tail, in tokens.
        parts: the text of prefix, context, question and tail, which add up to the rendered
            prompt; None if the prompt was made from ids.
        tokenizer: made the ids, for decoding; None if the prompt was made without one.

    Raises:
        PromptError: the ids are not one sequence of the length that the spans say.
    """

    ids: Tensor
    spans: PromptSpans
    parts: tuple[str, str, str, str] | None = None
    tokenizer: Any = None

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
        """A prompt from token ids.

        Args:
            ids: [T] or, as transformers' tokenizers return them, [1, T] whole numbers: one
                sequence without padding.
            context: (start, end) of the compressible context, absolute, end exclusive.
            question_end: where the question ends and the template's tail starts; default T.
            tokenizer: kept for decoding.

        Raises `PromptError` if ids or spans cannot be used.
        """
        try:
            tensor = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PromptError(
                f"ids must be token ids of one sequence, [T] whole numbers ({error})."
            ) from error
        if tensor.ndim == 2 and len(tensor) == 1:
            tensor = tensor[0]
        if tensor.ndim != 1:
            raise PromptError(
                f"ids must be one sequence of shape [T] or [1, T]; got shape "
                f"{list(tensor.shape)}. Compress the sequences of a batch one by one: "
                f"Prompt.from_ids(ids[0], ...)."
            )
        kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
        if len(tensor) and tensor.dtype not in kinds:
            raise PromptError(f"ids must be whole numbers; got {tensor.dtype}.")
        if len(tensor) and int(tensor.min()) < 0:
            raise PromptError(
                f"Token ids are not negative; got {int(tensor.min())}. Remove padding and label "
                f"masks (-100) first."
            )
        start, end = _pair(context)
        length = len(tensor)
        spans = PromptSpans(start, end, length if question_end is None else question_end, length)
        return cls(tensor.detach().to("cpu", torch.int64), spans, tokenizer=tokenizer)

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
        """A prompt from texts, in the tokenizer's chat format if it has one.

        The user's message is instruction, context and question, joined by `separator`; the
        assistant's turn opens with `answer_prefix`. Without a chat template the same text is used
        as it is. A fast tokenizer encodes the complete text at once, so the ids are those of the
        unsplit prompt; a slow one, which gives no offsets, encodes the four parts one by one
        (ours).

        Args:
            tokenizer: a Hugging Face tokenizer.
            context: the long text, the only part that may be compressed.
            question: may be empty; the question then counts as absent.
            instruction: stands before the context and is never compressed.
            answer_prefix: what the model's answer starts with, already given.
            separator: stands between the texts that are not empty; "" if they bring their own.
            template: False leaves the chat format out, as benchmarks of base models ask.

        Raises `PromptError` if the context is empty or the chat template changes the texts.
        """
        texts = {
            "context": context,
            "question": question,
            "instruction": instruction,
            "answer_prefix": answer_prefix,
            "separator": separator,
        }
        for name, text in texts.items():
            if not isinstance(text, str):
                raise PromptError(
                    f"{name} must be text; got {type(text).__name__}. Pass one prompt at a time; "
                    f"for token ids use Prompt.from_ids."
                )
        if not context.strip():
            raise PromptError(
                "The context is empty: there is nothing to compress. Pass the long text as "
                "context=, and what to do with it as instruction= or question=."
            )
        chat = template and _chat_template(tokenizer)
        before, after = _render(tokenizer, instruction, question, separator, chat)
        question_chars = _question_end(after, question)
        parts = (before, context, after[:question_chars], after[question_chars:] + answer_prefix)
        special = not chat
        if getattr(tokenizer, "is_fast", False):
            ids, borders = _tokenize_whole(tokenizer, parts, special)
        else:
            ids, borders = _tokenize_parts(tokenizer, parts, special)
        start, end, question_end = borders
        spans = PromptSpans(start, end, question_end, len(ids))
        return cls(torch.tensor(ids, dtype=torch.int64), spans, parts, tokenizer)


def _pair(context: object) -> tuple[int, int]:
    if (
        not isinstance(context, tuple | list)
        or len(context) != 2
        or not all(isinstance(x, int) and not isinstance(x, bool) for x in context)
    ):
        raise PromptError(
            f"context takes two token positions, (start, end) with the end exclusive; got "
            f"{context!r}."
        )
    return context[0], context[1]


def _chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _render(
    tokenizer: Any, instruction: str, question: str, separator: str, chat: bool
) -> tuple[str, str]:
    """The rendered prompt's text before and after the context.

    The template runs once, with a mark in the context's place, so headers, default system
    prompts and stripped blanks are the template's own.
    """
    number = 0
    while (mark := f"[[context {number}]]") in instruction + question:
        number += 1
    content = separator.join(text for text in (instruction, mark, question) if text)
    if chat:
        content = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    if content.count(mark) != 1:
        raise PromptError(
            f"The chat template shows the user's message {content.count(mark)} times; it must show "
            f"it exactly once and unchanged. Render the prompt yourself and use Prompt.from_ids."
        )
    before, _, after = content.partition(mark)
    return before, after


def _question_end(after: str, question: str) -> int:
    """Characters of `after` up to the question's last one."""
    wanted = question.strip()
    if not wanted:
        return 0
    at = after.find(wanted)
    if at < 0:
        raise PromptError(
            "The chat template changes the question's text, so its end cannot be found. Render "
            "the prompt yourself and use Prompt.from_ids."
        )
    return at + len(wanted)


def _tokenize_whole(
    tokenizer: Any, parts: tuple[str, str, str, str], special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the complete text, and the token where context, suffix and tail start."""
    encoded = tokenizer(
        "".join(parts), add_special_tokens=special, return_offsets_mapping=True, truncation=False
    )
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    ids = _without_eos(tokenizer, ids, special)
    offsets = offsets[: len(ids)]
    prefix, context, question, _ = (len(part) for part in parts)
    borders = [prefix, prefix + context, prefix + context + question]

    # A token across a border goes to the side that holds most of it; on a tie the context takes
    # it rather than the template, and the question rather than the tail.
    before: list[Callable[[int, int], bool]] = [
        lambda s, e: e <= borders[0] or (s < borders[0] and 2 * borders[0] > s + e),
        lambda s, e: e <= borders[1] or (s < borders[1] and 2 * borders[1] >= s + e),
        lambda s, e: e <= borders[2] or (s < borders[2] and 2 * borders[2] >= s + e),
    ]
    starts: list[int] = []
    for belongs in before:
        first = starts[-1] if starts else 0
        while first < len(ids) and belongs(*offsets[first]):
            first += 1
        starts.append(first)
    return ids, starts


def _tokenize_parts(
    tokenizer: Any, parts: tuple[str, str, str, str], special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the four parts one after the other, and the token where each of the last starts."""
    before, context, question, tail = parts
    # A blank alone at the end of the prefix would cost the next word its leading-blank token.
    kept = before.rstrip(" \t")
    pieces = [kept, before[len(kept) :] + context, question, tail]
    ids: list[int] = []
    starts: list[int] = []
    for number, piece in enumerate(pieces):
        first = special and number == 0
        if piece or first:
            new = list(tokenizer(piece, add_special_tokens=first, truncation=False)["input_ids"])
            ids += _without_eos(tokenizer, new, first)
        starts.append(len(ids))
    return ids, starts[:3]


def _without_eos(tokenizer: Any, ids: list[int], special: bool) -> list[int]:
    """`ids` without the end-of-sequence token that some tokenizers add to every text."""
    eos = getattr(tokenizer, "eos_token_id", None)
    bos = getattr(tokenizer, "bos_token_id", None)
    if special and eos is not None and ids and ids[-1] == eos and (len(ids) > 1 or eos != bos):
        return ids[:-1]
    return ids
