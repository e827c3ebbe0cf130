"""`BatchResult`: several compressed prompts of any lengths, continued together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from gracekv.distributed.sharding import check_whole
from gracekv.errors import PromptError
from gracekv.hf.base_result import BaseResult
from gracekv.hf.generation import decode_rows
from gracekv.pipeline.run import Run


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BatchResult(BaseResult):
    """What `compress` returns for a list of prompts; each has its own partition and budget.

    Attributes:
        model: the model that the cache belongs to.
        prompts: what was compressed, in order.
        pipeline: what made it, with the backend that reads it.
        keep_run: whether `details` are kept.
    """

    is_batch: ClassVar[bool] = True

    @property
    def details(self) -> tuple[Run, ...] | None:
        """What the stages made of each prompt, if `keep_run=True` was asked for."""
        return self._runs if self.keep_run else None

    def report(
        self, path: str | os.PathLike[str], *, answers: Sequence[str] | None = None
    ) -> tuple[Path, ...]:
        """Write a page for each prompt, page-1.html, page-2.html, ... for the path page.html.

        Returns their paths. `answers` are what the model said, prompt by prompt. Raises
        `ReportError` as `CompressionResult.report` does.
        """
        from gracekv.report import write_all

        check_whole(self.model, "report")
        return write_all(path, self, answers=answers)

    def generate(self, max_new_tokens: int = 64, **kwargs: Any) -> list[str]:
        """The model's answer to each prompt as text, greedy unless `kwargs` say otherwise.

        `kwargs` go to `model.generate`; with num_return_sequences=n there are n answers to the
        first prompt, then n to the second. Raises `PromptError` if a prompt has no tokenizer.
        """
        return decode_rows(self.tokenizer, self.generate_ids(max_new_tokens, **kwargs))

    def ask(self, *_: Any, **__: Any) -> NoReturn:
        """Questions are asked about one context: raises `PromptError`."""
        raise PromptError(
            "A batch holds several contexts, so it is not clear which one is asked or extended. "
            "Compress each context by itself and use its result; generate answers the prompts' own "
            "questions."
        )

    chat = extend = ask
