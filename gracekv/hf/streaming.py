"""Text as a model generates it, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import StoppingCriteriaList, TextIteratorStreamer

from gracekv.errors import ConfigError


def stream_text(
    tokenizer: Any, generate: Callable[[dict[str, Any]], object], options: dict[str, Any]
) -> Iterator[str]:
    """Run `generate(options)` in a thread and yield its text as soon as words are complete.

    Args:
        tokenizer: for decoding.
        generate: calls `model.generate` for one row with the options that it is given.
        options: of `model.generate`; a streamer and a stopping criterion are added.

    Closing the iterator stops the generation at the next token. Errors of `generate` are raised
    from the iterator. Raises `ConfigError` if `options` have a streamer already.
    """
    if options.get("streamer") is not None:
        raise ConfigError("Give either stream=True, which returns an iterator, or a streamer.")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    closed, failures = threading.Event(), list[BaseException]()

    def is_closed(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), closed.is_set(), device=ids.device)

    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), is_closed])

    def work() -> None:
        try:
            generate({**options, "streamer": streamer, "stopping_criteria": criteria})
        except BaseException as error:
            failures.append(error)
        finally:
            streamer.on_finalized_text("", stream_end=True)

    def pieces() -> Iterator[str]:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            closed.set()
            thread.join()
        if failures:
            raise failures[0]

    return pieces()
