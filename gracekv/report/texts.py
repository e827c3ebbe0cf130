"""The text of each prompt token."""

from __future__ import annotations

from typing import Any

from gracekv.prefill.prompt import Prompt

# How decoders show bytes of an incomplete character.
_INCOMPLETE = "\ufffd"


def token_texts(prompt: Prompt) -> list[str]:
    """T texts, which add up to the prompt's.

    Of a character that several tokens share, one token has all and the others have "". Where the
    prompt's text is known and the tokenizer gives offsets, the texts are cut from it; otherwise the
    ids are decoded one after the other. Without a tokenizer the ids are shown as numbers.
    """
    tokenizer = prompt.tokenizer
    if tokenizer is None:
        return [f"⟨{number}⟩ " for number in prompt.ids.tolist()]
    if prompt.parts is not None and getattr(tokenizer, "is_fast", False):
        found = _by_offsets(tokenizer, "".join(prompt.parts), prompt.ids.tolist())
        if found is not None:
            return found
    return _decoded(tokenizer, prompt)


def _by_offsets(tokenizer: Any, text: str, ids: list[int]) -> list[str] | None:
    """Slices of `text`; None if tokenising it again does not give `ids`."""
    for special in (False, True):
        encoded = tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, truncation=False
        )
        # An end-of-sequence token that the tokenizer adds by itself is not in the prompt.
        if list(encoded["input_ids"])[: len(ids)] == ids:
            break
    else:
        return None
    added = set(getattr(tokenizer, "all_special_ids", ()))
    texts, done = [], 0
    for number, (_, end) in zip(ids, encoded["offset_mapping"], strict=False):
        texts.append(text[done:end])
        if end == 0 and number in added:
            texts[-1] = str(tokenizer.convert_ids_to_tokens(number))
        done = max(done, end)
    return texts


def _decoded(tokenizer: Any, prompt: Prompt) -> list[str]:
    """Each token's text after the one before it, so that leading blanks are not lost."""
    ids, texts = prompt.ids, []
    first = read = 0
    for at in range(len(ids)):
        before = tokenizer.decode(ids[first:read], skip_special_tokens=False) if read else ""
        after = tokenizer.decode(ids[first : at + 1], skip_special_tokens=False)
        # A character has at most four bytes, so a longer wait is for bytes that are no text.
        waits = after.endswith(_INCOMPLETE) and at - read < 3 and at + 1 < len(ids)
        texts.append("" if waits else after[len(before) :])
        if not waits:
            first, read = read, at + 1
    return texts
