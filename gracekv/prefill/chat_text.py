"""Renders prompts and turns in the tokenizer's chat format, and encodes them as token ids.

Of a list of messages, those that a conversation has not read yet are encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count, pairwise
from os.path import commonprefix
from typing import Any, Literal

from gracekv.errors import EditedHistoryError, PromptError, expect, suggestion

# The leads that `continued` encodes before a text, in order. A word merges with a letter before
# it, rarely with a line end or a full stop; the rest serve texts that start with one of those.
_LEADS = ("a", "\n", ".", "0", "|", "\u4e2d")
Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages, as OpenAI's clients send them."""

_PLAIN = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})
_ONE = "Pass one prompt at a time; for token ids use Prompt.from_ids."
# Other fields, which clients add, are not rendered.
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
_CHANGED = (
    "The chat template does not show a message and the one after it once and unchanged. Render the "
    "conversation yourself and use model.generate with result.new_cache()."
)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat format; raises `PromptError` for a processor."""
    if hasattr(tokenizer, "image_processor"):
        raise PromptError("Prompts are text alone: pass the processor's tokenizer.")
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any, instruction: str, question: str, separator: str, chat: bool
) -> tuple[str, str]:
    """The rendered text before and after the context.

    The template runs once, with a placeholder for the context, so that headers, default system
    prompts and stripped blanks are the template's own. Raises `PromptError` if the template fails,
    or the placeholder does not appear exactly once and unchanged.
    """
    mark = _mark("context", instruction + question)
    content = separator.join(text for text in (instruction, mark, question) if text)
    if chat:
        content = shown(tokenizer, [{"role": "user", "content": content}], answers=True)
    if content.count(mark) != 1:
        raise PromptError(
            f"The chat template shows the user's message {content.count(mark)} times; it must show "
            f"it exactly once and unchanged. Render the prompt yourself and use Prompt.from_ids."
        )
    before, _, after = content.partition(mark)
    return before, after


def _mark(kind: str, text: str) -> str:
    """A placeholder that does not stand in `text`."""
    return next(mark for n in count() if (mark := f"[[{kind} {n}]]") not in text)


def shown(tokenizer: Any, messages: Sequence[Message], answers: bool, tools: Any = None) -> str:
    """The chat template's text of `messages`, with `answers` up to the start of the next answer.

    Raises `PromptError` if the template fails.
    """
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": answers}
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template may raise anything
        roles = ", ".join(str(one["role"]) for one in messages)
        raise PromptError(
            f"The tokenizer's chat template fails on messages of {roles}: {error}. Render the "
            f"prompt yourself and use Prompt.from_ids, or set another template."
        ) from error


def begun(tokenizer: Any, messages: Sequence[Message], tools: Any = None) -> tuple[int, list[int]]:
    """Ids of messages and the start of an answer, and how many stay if more messages follow.

    A template may end messages that are not answered with more, such as the end of the text.

    Raises `PromptError` if the template shows nothing of them yet.
    """
    ends, answered = (
        plain_ids(tokenizer, shown(tokenizer, messages, answers=answers, tools=tools))
        for answers in (False, True)
    )
    if not (shared := len(commonprefix([ends, answered]))):  # noqa: RUF071
        raise PromptError(
            "The chat template shows these messages only with a user's. Add the first of those."
        )
    return shared, answered


def turn_change(tokenizer: Any) -> list[int]:
    """Ids of what the chat template puts between a user's message and the answer."""
    return continued(tokenizer, render(tokenizer, "", "", "", True)[1])


def check_text(name: str, text: object, advice: str = _ONE) -> None:
    """Raise `PromptError` unless `text`, called `name`, is text that a tokenizer can read."""
    if not isinstance(text, str):
        raise PromptError(f"{name} must be text; got {type(text).__name__}. {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python decodes bytes that are not UTF-8, such as arguments, to lone surrogates.
        raise PromptError(
            f"{name} must be valid Unicode; got a lone surrogate, {text[error.start]!r}, at "
            f"position {error.start}. Decode it as UTF-8, or with errors='replace' if it is not."
        ) from error


def check_question(question: object, *, unread: bool = False) -> None:
    """Raise `PromptError` unless `question` is readable text that is not blank.

    It cannot be asked either where the context's own messages are `unread`.
    """
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f"A question is a text that is not empty; got {question!r}.")
    check_text("question", question)
    if unread:
        raise PromptError("This context consists of messages: begin with chat.send(messages).")


def encode(
    tokenizer: Any, parts: tuple[str, str, str, str], *, special: bool
) -> tuple[list[int], list[int]]:
    """Ids of the four parts of a prompt, and the tokens where context, suffix and tail start.

    `special`: add the tokenizer's special tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        return _encode_parts(tokenizer, parts, special)
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


def first_turn(tokenizer: Any, question: str, separator: str, template: bool) -> list[int]:
    """Ids of the first question after a context, up to the start of the answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    asked = [{"role": "user", "content": question}]
    return turn_ids(tokenizer, asked, separator, template, after="context")[0]


def turn_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    separator: str,
    template: bool,
    *,
    after: Literal["context", "answer"] | Sequence[Message] = "answer",
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
        after: whether they go on with the context's own message, or follow an answer whose turn
            they end; or the messages that they follow.
        tools: for the template.
        answer_prefix: given start of the next answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    if not (template and has_chat_template(tokenizer)):
        texts = [separator + (message.get("content") or "") for message in messages]
        return [continued(tokenizer, text) for text in (*texts[:-1], texts[-1] + answer_prefix)]
    mark = _mark("turn", str(messages))
    read = [_PLAIN[0], {"role": "assistant", "content": mark}, *messages]
    if after == "context":
        first = {**messages[0], "content": f"{mark}{separator}{messages[0]['content']}"}
        read = [first, *messages[1:]]
    elif not isinstance(after, str):
        read, mark = [*after, *messages], ""

    def rendered(count: int, *, answers: bool = False) -> str:
        some = read[: len(read) - len(messages) + count]
        text = shown(tokenizer, some, answers=answers, tools=tools)
        if mark and text.count(mark) != 1:
            raise PromptError(_CHANGED)
        return text.partition(mark)[2] if mark else text

    whole = rendered(len(messages), answers=True) + answer_prefix
    asked = [str(one["content"]).strip() for one in messages if one["role"] == "user"]
    if not all(text in whole for text in asked):
        raise PromptError(_CHANGED)
    encoded = partial(continued if mark else plain_ids, tokenizer)
    ids, start, place = encoded(whole), 0, 0
    if not isinstance(after, str):
        start, known = begun(tokenizer, after, tools)
        if ids[:start] != known[:start]:
            # Such as a thought that is removed from older answers: as after a plain answer.
            end = shown(tokenizer, _PLAIN, answers=False, tools=tools).rpartition(".")[2]
            turn, *rest = turn_ids(
                tokenizer, messages, separator, template, tools=tools, answer_prefix=answer_prefix
            )
            return [turn[len(continued(tokenizer, end)) :], *rest]
        place = len(commonprefix([rendered(0), rendered(0, answers=True)]))  # noqa: RUF071
    borders = [place]
    for n, message in enumerate(messages[:-1], 1):
        # A template may show a message otherwise when another follows it: it ends with its content.
        said = str(message.get("content") or "").strip()
        same = len(commonprefix([rendered(n), whole]))  # noqa: RUF071
        found = whole.find(said, borders[-1])
        borders.append(max(same, found + len(said) if found >= 0 else 0))
    pieces = [whole[a:b] for a, b in pairwise([*borders, len(whole)])]
    turns = [continued(tokenizer, piece) for piece in pieces]
    if list(chain.from_iterable(turns)) == ids[start:]:  # as where a special token starts each turn
        return turns
    ends = [len(commonprefix([encoded(whole[:x]), ids])) for x in borders[1:]]  # noqa: RUF071
    return [ids[a:b] for a, b in pairwise([start, *ends, len(ids)])]


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text alone, whole and without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])


def continued(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues another text.

    Some tokenizers put a blank before the first word of a text, so it is encoded after a short lead
    whose ids are then removed. A lead works only if its own ids come first: otherwise a token spans
    both. If none works, the text is encoded alone, which loses nothing but may add that blank.
    """
    for lead in _LEADS if text else ():
        first, ids = plain_ids(tokenizer, lead), plain_ids(tokenizer, lead + text)
        if first and ids[: len(first)] == first:
            return ids[len(first) :]
    return plain_ids(tokenizer, text) if text else []


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


def new_turns(
    tokenizer: Any,
    known: Sequence[Message],
    given: Sequence[Message],
    context: int = 0,
    *,
    tools: Sequence[Any] | None = None,
    separator: str = "\n\n",
    template: bool = True,
) -> list[tuple[str, list[int]]]:
    """Role and token ids of each message of `given` that was not read yet.

    The last one's ids go up to the start of the answer.

    Args:
        tokenizer: renders and encodes messages.
        known: the messages that were read, the last one an answer; none before the first turn.
        given: the whole history as OpenAI's clients send it.
        context: how many messages the compressed context consists of; 0 if it is a document, whose
            turn the first message goes on with.
        tools: the definitions of tools, which belong to the context.
        separator: between a document and the first message.
        template: whether the chat format is used.

    Raises:
        EditedHistoryError: a message differs from the one that was read in its place.
        PromptError: a message is malformed, there is no new one, or the template cannot show it
            after the context.
    """
    known, given = plain_messages(known), plain_messages(given)
    for number, old in enumerate(known):
        if number >= len(given) or not is_same(old, given[number]):
            raise EditedHistoryError(
                f"Message {number}, of role {old['role']!r}, is not the one that was read. Send "
                f'the history unchanged, or compress it anew with edited="compress".'
            )
    new = given[max(len(known), context) :]
    if not known and not context and (tools or (new and new[0]["role"] != "user")):
        raise PromptError(
            "A system prompt and tools stand before the context, which is a document here: after "
            "it, the first message is a user's. Compress Prompt.from_messages(tokenizer, messages, "
            "tools=tools) instead."
        )
    if not new and (known or len(given) < max(context, 1)):
        raise PromptError("There is no new message to answer.")
    after: Any = "answer" if known else given[:context] or "context"
    end = list[int]()
    called = [_PLAIN[0], given[len(known) - 1]] if known else []
    if template and called and called[1].get("tool_calls") and has_chat_template(tokenizer):
        # Results are shown behind a call alone, and a call may end otherwise than an answer.
        count, ids = begun(tokenizer, called, tools)
        added = {*getattr(tokenizer, "get_added_vocab", dict)().values()}
        if places := [n for n in range(count) if ids[n] in added]:
            after, end = called, ids[places[-1] : count]
    first, *rest = turn_ids(tokenizer, new, separator, template, after=after, tools=tools)
    roles = [one["role"] for one in new] or [given[-1]["role"]]
    return list(zip(roles, [end + first, *rest], strict=True))


def plain_messages(given: Any) -> list[Message]:
    """The messages with their content as text, which may come in parts of type "text".

    Raises `PromptError` unless `given` is a list of messages with roles, and for one that looks
    mistyped. The content may be missing where an assistant calls tools.
    """
    expect(given, list | tuple, "Messages are a list (for a text there is chat.ask)", PromptError)
    return [_plain(number, message) for number, message in enumerate(given)]


def _plain(number: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    near = "" if role in ROLES else suggestion(str(role), ROLES)
    if not isinstance(role, str) or near:  # templates may know others, such as "ipython"
        raise PromptError(
            f"Message {number} must be a mapping with a role of {', '.join(ROLES)}; got "
            f"{role or message!r}.{near}"
        )
    parts = message.get("content")
    if parts is None and role == "assistant" and message.get("tool_calls"):
        return {**message}
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in (parts if isinstance(parts, list) else [parts])
    ]
    advice = 'Only texts are read, whole or in parts: [{"type": "text", "text": ...}].'
    for text in texts:
        check_text(f"The content of message {number}", text, advice)
    return {**message, "content": "\n".join(texts)}


def is_same(old: Message, given: Message) -> bool:
    """Whether `given` is `old`; an answer may come back as the tool calls that it was read as."""
    if old["role"] == given["role"] == "assistant" and given.get("tool_calls"):
        return old.get("tool_calls") in (None, given["tool_calls"])
    return all((old.get(name) or "") == (given.get(name) or "") for name in _COMPARED)
