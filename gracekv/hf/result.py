"""`CompressionResult`: a compressed prompt, ready to be continued any number of times."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from gracekv.errors import ConfigError
from gracekv.hf.base_result import BaseResult
from gracekv.hf.generation import decode_rows
from gracekv.pipeline import Run
from gracekv.prefill.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompressionResult(BaseResult):
    """What `compress` returns. The prefill is not kept: its memory is what compression frees.

    Attributes:
        model: the model that the cache belongs to.
        prompts: the one prompt that was compressed.
        pipeline: what made it, with the backend that reads it.
        keep_run: whether `details` are kept.
    """

    is_batch: ClassVar[bool] = False

    @property
    def prompt(self) -> Prompt:
        """What was compressed."""
        return self.prompts[0]

    @property
    def _run(self) -> Run:
        return self._runs[0]

    @property
    def details(self) -> Run | None:
        """Partition, relevance, forest and frontier, if `keep_run=True` was asked for."""
        return self._runs[0] if self.keep_run else None

    def report(
        self, path: str | os.PathLike[str], *, label: str | None = None, answer: str | None = None
    ) -> None:
        """Write one HTML page that shows what was kept where; see `gracekv.report`.

        The page needs no network and no other file; it holds the prompt's text. Several results
        side by side: `gracekv.report.compare`.

        Args:
            path: the file; its folder is made.
            label: the result's name on the page; default: how many times fewer entries it keeps.
            answer: what the model said, shown beside the accounting.

        Raises `ReportError` if the result was loaded from a file and holds merged entries: what
        they stand for is not in the file.
        """
        from gracekv.report import write

        write(path, self, label=label, answer=answer)

    def generate(self, max_new_tokens: int = 64, **kwargs: Any) -> str:
        """The model's answer as text, greedy unless `kwargs` say otherwise.

        `kwargs` go to `model.generate`. Every call starts from the compressed prompt, so calls
        can be repeated. Raises `PromptError` if the prompt has no tokenizer, `ConfigError` if more
        than one sequence comes back.
        """
        if kwargs.get("num_return_sequences", 1) != 1:
            raise ConfigError(
                f"generate returns one text; got num_return_sequences="
                f"{kwargs['num_return_sequences']}. Use generate_ids and decode its rows."
            )
        return decode_rows(self.prompts, self.generate_ids(max_new_tokens, **kwargs))[0]
