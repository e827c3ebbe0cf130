"""Checks of what is asked about a compressed context."""

from __future__ import annotations

from typing import Any

from gracekv.decode import Limit
from gracekv.errors import PromptError
from gracekv.hf.generation import check_new_tokens
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import trained_length


def check_context(prompt: Prompt) -> None:
    """Raise `PromptError` unless questions can be asked about this prompt."""
    if prompt.has_question:
        raise PromptError(
            "This prompt has a question of its own, which generate answers. To ask anything later, "
            "compress a prompt without one: Prompt.from_chat(tokenizer, context=text)."
        )
    if prompt.tokenizer is None:
        raise PromptError(
            "Questions need a tokenizer. Use Prompt.from_chat(tokenizer, ...), "
            "Prompt.from_ids(..., tokenizer=tokenizer) or gracekv.load(..., tokenizer=tokenizer)."
        )


def check_room(
    model: Any, prompt: Prompt, length: int, new_tokens: int, limit: Limit | None
) -> None:
    """Raise `PromptError` if a sequence of `length` tokens and its answer pass the last position.

    A context that is itself longer than what the model was made for had its warning already; a
    limit with closed positions knows no last one. `ConfigError` if `new_tokens` is no number of
    tokens.
    """
    check_new_tokens(new_tokens)
    most = trained_length(model)
    if most is None or prompt.spans.context_end > most or length + new_tokens - 1 <= most:
        return
    if limit is not None and limit.positions == "closed":
        return
    room = most - length + 1
    advice = (
        f"Ask with max_new_tokens={room} or less."
        if room > 0
        else "Ask a shorter question, or begin a new conversation."
    )
    raise PromptError(
        f"Context and question have {length} tokens, and with {new_tokens} new ones they pass the "
        f"{most} positions of {type(model).__name__}. {advice}"
    )
