"""Independent questions to one compressed context, and what makes a question unusable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import PromptError
from gracekv.hf.base_result import BaseResult
from gracekv.hf.generation import continue_ids, padding_id
from gracekv.prefill.chat_text import first_turn
from gracekv.prefill.length_limits import trained_length
from gracekv.prefill.prompt import Prompt


def ask_ids(
    result: BaseResult,
    questions: Sequence[str],
    max_new_tokens: int,
    options: dict[str, Any],
) -> Tensor:
    """int64 [rows, new tokens]: the answers to `questions`, all over the one packed part.

    Raises `PromptError` if the context has a question already or no tokenizer, or if a question is
    empty or does not fit the positions that are left.
    """
    prompt = result.prompts[0]
    check_context(prompt)
    if not isinstance(questions, Sequence) or not questions:
        given = "an empty list" if questions == [] else repr(questions)
        raise PromptError(f"ask takes a question or a list of at least one; got {given}.")
    context = prompt.ids[: prompt.spans.context_end]
    rows = []
    for question in questions:
        check_question(question)
        new = first_turn(prompt.tokenizer, question, prompt.separator, prompt.template)
        rows.append(torch.cat([context, torch.tensor(new)]))
        check_room(result.model, prompt, len(rows[-1]), max_new_tokens)
    asked = [rows]
    if result.packed.kept and len({len(row) for row in rows}) > 1:
        # Padding between context and question would take places in sliding windows.
        asked = [[row] for row in rows]
    answers = [
        continue_ids(
            result.model, some, result.new_cache(), prompt.tokenizer, max_new_tokens, dict(options)
        )
        for some in asked
    ]
    width = max(answer.shape[1] for answer in answers)
    fill = padding_id(result.model, prompt.tokenizer)
    return torch.cat([functional.pad(x, (0, width - x.shape[1]), value=fill) for x in answers])


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


def check_question(question: object) -> None:
    """Raise `PromptError` unless it is a text that is not empty."""
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f"A question is a text that is not empty; got {question!r}.")


def check_room(model: Any, prompt: Prompt, length: int, new_tokens: int) -> None:
    """Raise `PromptError` if a sequence of `length` tokens and its answer pass the last position.

    A context that is itself longer than what the model was made for had its warning already.
    """
    most = trained_length(model)
    if most is None or prompt.spans.context_end > most or length + new_tokens - 1 <= most:
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
