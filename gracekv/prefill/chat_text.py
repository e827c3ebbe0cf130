"""Renders prompts and turns in the tokenizer's chat format, and encodes them as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import Any, Literal

import torch
from torch import Tensor

from gracekv.errors import PromptError

# The leads that `continued` encodes before a text, in order. A word merges with a letter before
# it, rarely with a line end or a full stop; the rest serve texts that start with one of those.
_LEADS = ("a", "\n", ".", "0", "|", "\u4e2d")
_CHANGED = (
    "The chat template does not show a message and the one after it once and unchanged. Render the "
    "conversation yourself and use model.generate with result.new_cache()."
)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat format."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any, instruction: str, question: str, separator: str, chat: bool
) -> tuple[str, str]:
    """The rendered text before and after the context.

    The template runs once, with a placeholder for the context, so that headers, default system
    prompts and stripped blanks are the template's own. Raises `PromptError` if the placeholder does
    not appear exactly once and unchanged.
    """
    number = 0
    while (mark := f"[[context {number}]]") in instruction + question:
        number += 1
    content = separator.join(text for text in (instruction, mark, question) if text)
    if chat:
        content = templated(tokenizer, [{"role": "user", "content": content}])
    if content.count(mark) != 1:
        raise PromptError(
            f"The chat template shows the user's message {content.count(mark)} times; it must show "
            f"it exactly once and unchanged. Render the prompt yourself and use Prompt.from_ids."
        )
    before, _, after = content.partition(mark)
    return before, after


def templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The text of `messages` up to the start of the next answer, by the chat template.

    Raises `PromptError` if the template fails.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may raise anything
        raise PromptError(
            f"The tokenizer's chat template fails on the roles "
            f"{', '.join(message['role'] for message in messages)}: {error}. Render the prompt "
            f"yourself and use Prompt.from_ids, or set another template."
        ) from error
    return text


def check_text(name: str, text: object) -> None:
    """Raise `PromptError` unless `text`, called `name`, is text that a tokenizer can read."""
    if not isinstance(text, str):
        raise PromptError(
            f"{name} must be text; got {type(text).__name__}. Pass one prompt at a time; for token "
            f"ids use Prompt.from_ids."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python decodes bytes that are not UTF-8, such as arguments, to lone surrogates.
        raise PromptError(
            f"{name} must be valid Unicode; got a lone surrogate, {text[error.start]!r}, at "
            f"position {error.start}. Decode it as UTF-8, or with errors='replace' if it is not."
        ) from error


def check_question(question: object) -> None:
    """Raise `PromptError` unless `question` is readable text that is not blank."""
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f"A question is a text that is not empty; got {question!r}.")
    check_text("question", question)


def question_end(after: str, question: str) -> int:
    """The offset in `after` at which the question ends; `PromptError` if it is not there."""
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


def encode(
    tokenizer: Any, parts: tuple[str, str, str, str], *, special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the four parts of a prompt, and the tokens where context, suffix and tail start.

    `special`: add the tokenizer's special tokens.
    """
    fast = getattr(tokenizer, "is_fast", False)
    return (_encode_whole if fast else _encode_parts)(tokenizer, parts, special)


def first_turn(tokenizer: Any, question: str, separator: str, template: bool) -> list[int]:
    """Ids of the first question after a context, up to the start of the answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    asked = [{"role": "user", "content": question}]
    return turn_ids(tokenizer, asked, separator, template, after="context")[0]


def next_turn(
    tokenizer: Any, question: str, separator: str, template: bool, answer_prefix: str = ""
) -> list[int]:
    """Ids of a question after an answer, from the end of its turn to the start of the next answer.

    `answer_prefix` is the given start of the next answer. Raises `PromptError` if the chat template
    changes the texts.
    """
    asked = [{"role": "user", "content": question}]
    return turn_ids(tokenizer, asked, separator, template, answer_prefix=answer_prefix)[0]


def turn_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    separator: str,
    template: bool,
    *,
    after: Literal["context", "messages", "answer"] = "answer",
    tools: Sequence[Any] | None = None,
    answer_prefix: str = "",
) -> list[list[int]]:
    """Ids of each of `messages`, the last up to the start of the next answer.

    Earlier turns are not rendered again, so their tokens stay as they are, even those that a
    template would remove from old answers.

    Args:
        tokenizer: renders and encodes them.
        messages: as chat templates take them; none stands for the start of the answer alone.
        separator: between the context and the first message, if that goes on with its turn.
        template: whether the chat format is used, if the tokenizer has one.
        after: whether they go on with the context's own message, or follow whole messages, or an
            answer whose turn they end.
        tools: for the template.
        answer_prefix: given start of the next answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    if not (template and has_chat_template(tokenizer)):
        texts = [separator + str(message["content"]) for message in messages]
        return [continued(tokenizer, text) for text in (*texts[:-1], texts[-1] + answer_prefix)]
    number = 0
    while (mark := f"[[turn {number}]]") in str(messages):
        number += 1
    shown = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}, *messages]
    if after == "context":
        first = {**messages[0], "content": f"{mark}{separator}{messages[0]['content']}"}
        shown = [first, *messages[1:]]

    def rendered(count: int, *, answers: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            shown[: len(shown) - len(messages) + count],
            tools=tools,
            tokenize=False,
            add_generation_prompt=answers,
        )
        if text.count(mark) != 1:
            raise PromptError(_CHANGED)
        return text.partition(mark)[2]

    whole = rendered(len(messages), answers=True)
    asked = [str(one["content"]).strip() for one in messages if one["role"] == "user"]
    if not all(text in whole for text in asked):
        raise PromptError(_CHANGED)
    start = len(rendered(0)) if after == "messages" else 0
    ids = continued(tokenizer, whole[start:] + answer_prefix)
    # A template may show a message otherwise when another follows it.
    shared = (commonprefix([rendered(n), whole]) for n in range(1, len(messages)))  # noqa: RUF071
    ends = [len(continued(tokenizer, text[start:])) for text in shared]
    return [ids[a:b] for a, b in pairwise([0, *ends, len(ids)])]


def continued(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues another text.

    Some tokenizers put a blank before the first word of a text, so it is encoded after a short lead
    whose ids are then removed. A lead works only if its own ids come first: otherwise a token spans
    both. If none works, the text is encoded alone, which loses nothing but may add that blank.
    """

    def plain(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])

    for lead in _LEADS if text else ():
        first, ids = plain(lead), plain(lead + text)
        if first and ids[: len(first)] == first:
            return ids[len(first) :]
    return plain(text) if text else []


def _encode_whole(
    tokenizer: Any, parts: tuple[str, str, str, str], special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the whole text, and the tokens where context, suffix and tail start."""
    encoded = tokenizer(
        "".join(parts), add_special_tokens=special, return_offsets_mapping=True, truncation=False
    )
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    ids = _without_eos(tokenizer, ids, special)
    offsets = offsets[: len(ids)]
    prefix, context, question, _ = (len(part) for part in parts)
    borders = [prefix, prefix + context, prefix + context + question]

    # A token across a border belongs to the side with most of its characters; on a tie, to the
    # context rather than the template, and to the question rather than the tail.
    starts, first = list[int](), 0
    for border, least in zip(borders, (1, 0, 0), strict=True):
        while first < len(ids):
            start, end = offsets[first]
            if end > border and (start >= border or 2 * border - start - end < least):
                break
            first += 1
        starts.append(first)
    return ids, starts


def _encode_parts(
    tokenizer: Any, parts: tuple[str, str, str, str], special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the four parts one after the other, and the tokens where the last three start."""
    before, context, question, tail = parts
    # A trailing blank in the prefix would split off the leading blank of the next word's token.
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
    """Remove the end-of-sequence token that some tokenizers add to every text."""
    eos = getattr(tokenizer, "eos_token_id", None)
    bos = getattr(tokenizer, "bos_token_id", None)
    if special and eos is not None and ids and ids[-1] == eos and (len(ids) > 1 or eos != bos):
        return ids[:-1]
    return ids


def checked_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Convert ids [T] or [1, T] to int64 [T] on the CPU.

    Raises `PromptError` unless they are ids of one sequence.
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
    return tensor.detach().to("cpu", torch.int64)
