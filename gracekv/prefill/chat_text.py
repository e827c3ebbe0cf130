"""Renders a prompt in the tokenizer's chat format and encodes it as token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import date
from itertools import accumulate, count
from typing import Any

from gracekv.errors import PromptError

# The leads that `continued` tries before a text, in order. A word may merge with a letter before
# it, rarely with a line end or a full stop; the rest are for texts that start with one of those.
_LEADS = ("a", "\n", ".", "0", "|", "\u4e2d")
Message = Mapping[str, Any]
_Parts = tuple[str, str, str, str]  # as `Prompt.parts`
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages in OpenAI's format."""
_ONE = "Pass one prompt at a time; for token ids use Prompt.from_ids."


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template.

    Raises `PromptError` for a processor, and for mistral-common's tokenizers, which have none.
    """
    if hasattr(tokenizer, "image_processor"):
        raise PromptError("Prompts are text only: pass the processor's tokenizer.")
    kind = type(tokenizer).__name__.removeprefix("Cached")  # vLLM's prefix
    if kind in ("MistralCommonBackend", "MistralTokenizer"):
        raise PromptError(
            "mistral-common's tokenizer has no chat template. Load that of transformers with "
            "AutoTokenizer.from_pretrained(..., mistral_format=False), in a server with "
            "--tokenizer-mode hf, or pass token ids."
        )
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any, instruction: str, question: str, separator: str, chat: bool
) -> tuple[str, str]:
    """The rendered text before and after the context.

    The template runs once, with a placeholder for the context, so headers, default system prompts
    and stripped blanks are the template's own. Raises `PromptError` if the template fails or does
    not show the placeholder exactly once and unchanged.
    """
    mark = placeholder("context", instruction + question)
    content = separator.join(text for text in (instruction, mark, question) if text)
    if chat:
        content = rendering(tokenizer, [{"role": "user", "content": content}], answers=True)
    if content.count(mark) != 1:
        raise PromptError(
            f"The chat template shows the user's message {content.count(mark)} times; it must show "
            f"it exactly once and unchanged. Render the prompt yourself and use Prompt.from_ids."
        )
    before, _, after = content.partition(mark)
    return before, after


def placeholder(kind: str, text: str) -> str:
    """A placeholder that does not occur in `text`."""
    return next(mark for n in count() if (mark := f"[[{kind} {n}]]") not in text)


def rendering(tokenizer: Any, messages: Sequence[Message], answers: bool, tools: Any = None) -> str:
    """The chat template's text of `messages`; with `answers`, up to the start of the next answer.

    Raises `PromptError` if the template fails.
    """
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": answers}
    try:
        with suppress(Exception):  # some templates only take arguments as text
            return str(tokenizer.apply_chat_template([*map(with_mappings, messages)], **options))
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template may raise anything
        roles = ", ".join(str(one["role"]) for one in messages)
        raise PromptError(
            f"The tokenizer's chat template fails on messages of {roles}: {error}. Render the "
            f"prompt yourself and use Prompt.from_ids, or set another template."
        ) from error


def with_mappings(message: Message) -> Message:
    """A message with the arguments of its tool calls as mappings; OpenAI's clients send JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        with suppress(AttributeError, TypeError, ValueError):  # no mapping, not text, or not JSON
            function: Any = call.get("function") or {}
            if isinstance(read := json.loads(function.get("arguments")), dict):
                call = {**call, "function": {**function, "arguments": read}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def with_date(tokenizer: Any, day: str) -> Any:
    """A tokenizer whose chat template shows `day`, an ISO date, as today's.

    The tokenizer itself if its template shows no date. Raises `PromptError` for another format.
    """
    try:
        when = date.fromisoformat(day)
    except (TypeError, ValueError) as error:
        raise PromptError(f"day takes a date such as '2026-11-30'; got {day!r}.") from error
    if "strftime_now" not in str(template := getattr(tokenizer, "chat_template", "")):
        return tokenizer
    # Not the beginning of a block, {%if.
    codes = dict.fromkeys(re.findall(r"(?<!\{)%-?[a-zA-Z]", str(template)))
    filters = "".join(f"|replace('{x}', '{when:{x}}')" for x in codes)
    # Rendered without the newline after a block.
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"
    result = copy(tokenizer)
    if isinstance(template, dict):  # by name
        result.chat_template = {x: macro + y for x, y in template.items()}
    else:
        result.chat_template = macro + template
    return result


def turn_change(tokenizer: Any) -> list[int]:
    """Ids of the chat template's text between a user's message and the answer."""
    return continued(tokenizer, render(tokenizer, "", "", "", True)[1])


def check_text(name: str, text: object, advice: str = _ONE) -> None:
    """Raise `PromptError` unless `text`, called `name`, is a string that a tokenizer can read."""
    if not isinstance(text, str):
        raise PromptError(f"{name} must be text; got {type(text).__name__}. {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python decodes bytes that are not UTF-8, in arguments for example, to lone surrogates.
        raise PromptError(
            f"{name} must be valid Unicode; got a lone surrogate, {text[error.start]!r}, at "
            f"position {error.start}. Decode it as UTF-8, or with errors='replace' if it is not."
        ) from error


def check_question(question: object) -> None:
    """Raise `PromptError` unless `question` is readable, non-blank text."""
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f"A question must be non-empty text; got {question!r}.")
    check_text("question", question)


def encode(tokenizer: Any, parts: _Parts, *, special: bool) -> tuple[list[int], list[int]]:
    """Ids of the four parts of a prompt, and the positions where context, suffix and tail start.

    With `special`, add the tokenizer's special tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        return _encode_parts(tokenizer, parts, special)
    options = {"add_special_tokens": special, "return_offsets_mapping": True, "truncation": False}
    encoded = tokenizer("".join(parts), **options)
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    # An end-of-turn token of the text itself has a nonempty offset.
    ids = _without_eos(tokenizer, ids, special and offsets[-1:] == [(0, 0)])
    offsets = offsets[: len(ids)]
    borders = list(accumulate(map(len, parts[:3])))

    # A token across a border belongs to the side with most of its characters; on a tie, to the
    # context rather than the template, and to the question rather than the tail. The template's own
    # tokens stay with it, even if they absorb blanks of the context.
    starts, first = list[int](), 0
    template_ids = {*getattr(tokenizer, "get_added_vocab", dict)().values()}
    for border, least in zip(borders, (1, 0, 0), strict=True):
        while first < len(ids):
            start, end = offsets[first]
            most = 2 * border - start - end < least
            inside = border != borders[0] if ids[first] in template_ids else most
            if end > border and (start >= border or inside):
                break
            first += 1
        starts.append(first)
    return ids, starts


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text by itself, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])


def continued(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues another text.

    Some tokenizers put a blank before the first word of a text, so it is encoded after a short lead
    whose ids are then removed. A lead works only if its own ids come first; otherwise a token spans
    both. If none works, the text is encoded by itself, which is lossless but may add that blank.
    """
    for lead in _LEADS if text else ():
        first, ids = plain_ids(tokenizer, lead), plain_ids(tokenizer, lead + text)
        if first and ids[: len(first)] == first:
            return ids[len(first) :]
    return plain_ids(tokenizer, text) if text else []


def _encode_parts(tokenizer: Any, parts: _Parts, special: bool) -> tuple[list[int], list[int]]:
    """Ids of the four parts, encoded one by one, and the positions where the last three start."""
    before, context, question, tail = parts
    # A trailing blank in the prefix would split off the leading blank of the next word's token.
    prefix = before.rstrip(" \t")
    pieces = [prefix, before[len(prefix) :] + context, question, tail]
    ids: list[int] = []
    starts: list[int] = []
    for number, piece in enumerate(pieces):
        first = special and number == 0
        if piece or first:
            how, begun = {"add_special_tokens": first, "truncation": False}, any(pieces[:number])
            new = continued(tokenizer, piece) if begun else tokenizer(piece, **how)["input_ids"]
            ids += _without_eos(tokenizer, list(new), first)
        starts.append(len(ids))
    return ids, starts[:3]


def _without_eos(tokenizer: Any, ids: list[int], special: bool) -> list[int]:
    """Remove the end-of-sequence token that some tokenizers add to every text."""
    eos = getattr(tokenizer, "eos_token_id", None)
    bos = getattr(tokenizer, "bos_token_id", None)
    if special and eos is not None and ids and ids[-1] == eos and (len(ids) > 1 or eos != bos):
        return ids[:-1]
    return ids
