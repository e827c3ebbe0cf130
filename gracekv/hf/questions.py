"""Questions about a compressed context: which ones can be asked, and the ids of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gracekv.decode import Limit
from gracekv.errors import PromptError
from gracekv.hf.base_result import BaseResult
from gracekv.hf.generation import check_new_tokens, continue_ids, padding_id
from gracekv.prefill.chat_text import check_question
from gracekv.prefill.length_limits import trained_length
from gracekv.prefill.messages import first_turn
from gracekv.prefill.prompt import Prompt


def check_context(prompt: Prompt) -> None:
    """Raise `PromptError` unless questions can be asked about this prompt."""
    if prompt.has_question:
        raise PromptError(
            "This prompt has a question of its own, which generate answers. To ask others later, "
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

    A context that is itself longer than the model supports has caused a warning already; with
    closed positions there is no last one. `ConfigError` if `new_tokens` is not a number of tokens.
    """
    check_new_tokens(new_tokens)
    bound, closed = trained_length(model), getattr(limit, "positions", None) == "closed"
    if closed or bound is None or not prompt.spans.context_end <= bound < length + new_tokens - 1:
        return
    room, advice = bound - length + 1, "Ask a shorter question, or begin a new conversation."
    if room > 0:
        advice = f"Ask with max_new_tokens={room} or less."
    raise PromptError(
        f"Context, question and {new_tokens} new tokens need {length + new_tokens - 1} positions; "
        f"{type(model).__name__} has {bound}. {advice}"
    )


def ask_ids(
    result: BaseResult,
    questions: Sequence[str],
    max_new_tokens: int,
    options: dict[str, Any],
    limit: Limit | None = None,
) -> Tensor:
    """int64 [rows, new tokens]: the answers to `questions`, over the shared context.

    Raises `PromptError` if the context has a question already or no tokenizer, or if a question is
    empty or does not fit into the remaining positions.
    """
    model, prompt, tokenizer = result.model, result.prompts[0], result.tokenizer
    check_context(prompt)
    if not isinstance(questions, Sequence) or not questions:
        given = "an empty list" if isinstance(questions, Sequence) else repr(questions)
        raise PromptError(f"ask takes a question or a list of at least one; got {given}.")
    if prompt.messages:
        raise PromptError("This context consists of messages: use result.chat().send(messages).")
    context = prompt.ids[: prompt.spans.context_end]
    rows = []
    for question in questions:
        check_question(question)
        new = first_turn(tokenizer, question, prompt.separator, prompt.template)
        rows.append(torch.cat([context, context.new_tensor(new)]))
        check_room(model, prompt, len(rows[-1]), max_new_tokens, limit)
    # Padding between context and question would take up sliding windows.
    apart = result.packed.other_layers and len({len(row) for row in rows}) > 1
    batches = [[row] for row in rows] if apart else [rows]
    outputs = list[Tensor]()
    for some in batches:
        cache = result.new_cache(limit)
        outputs += continue_ids(model, some, cache, tokenizer, max_new_tokens, options)
    return pad_sequence(outputs, batch_first=True, padding_value=padding_id(model, tokenizer))
