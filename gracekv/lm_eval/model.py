"""`GraceLM`: lm-eval's `hf` model, which answers from compressed caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

from gracekv.allocate import Budget, BudgetOptions
from gracekv.errors import PromptError, TaskError
from gracekv.evaluate.answers import teacher_force
from gracekv.hf.base_result import BaseResult
from gracekv.hf.compress import chosen_pipeline, compress, per_byte
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline
from gracekv.prefill.chat_text import turn_change
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import PromptSpans
from gracekv.prefill.supported import check_model
from gracekv.registry import Configurable, bounded

# A request of lm-eval: its texts (None for a part of one), context ids and continuation ids.
_Request = tuple[tuple[str, str] | None, list[int], list[int]]


@dataclass(frozen=True)
class Parts(Configurable):
    """The parts of a prompt other than the context, in tokens.

    Attributes:
        question_tokens: how many of a prompt's last tokens are the question, which is kept whole.
        question_seen: whether the recipe may read the question before it compresses the context.
        prefix_tokens: how many of a prompt's first tokens are kept whole: attention sinks.
    """

    question_tokens: int = bounded(128, at_least=1)
    question_seen: bool = False
    prefix_tokens: int = bounded(4, at_least=0)


class GraceLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` model, which answers from physically compressed caches.

    A prompt of T tokens consists of `prefix_tokens`, the context, and `question_tokens`. Only the
    context is compressed, and the budget is for the context. Continuations of one context are
    scored over one compressed cache. `hf`'s handling of prompts, stop strings and answers is
    unchanged.

    Args:
        pretrained: a name or folder of a model, or a loaded model.
        pipeline: a recipe's name or a pipeline file; default: as for `gracekv.compress`, by
            `question_seen`.
        backend: the attention backend for decoding; default: the pipeline's.
        question_tokens: how many of a prompt's last tokens are the question, which is kept whole.
        question_seen: whether the recipe may read the question before it compresses the context.
        prefix_tokens: how many of a prompt's first tokens are kept whole: attention sinks.
        options: the budget, as in `gracekv.compress`, and options of lm-eval's `hf` model for
            loading model and tokenizer.

    Raises:
        BudgetError: not exactly one budget is given.
        ConfigError: another argument cannot be used.
        UnsupportedModelError: gracekv does not support the model.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        pipeline: str | None = None,
        backend: str | None = None,
        question_tokens: int = 128,
        question_seen: bool = False,
        prefix_tokens: int = 4,
        **options: Any,
    ) -> None:
        self._budget = Budget.of({x: options.pop(x, None) for x in BudgetOptions.__annotations__})
        self._parts = Parts(question_tokens, question_seen, prefix_tokens)
        named = None if pipeline is None else load_pipeline(pipeline)
        super().__init__(pretrained, backend="causal", **options)
        check_model(self.model)
        with self._precision():
            by_byte = per_byte(self.model, self._budget)
        pipe = named or Pipeline.default(question=question_seen, per_byte=by_byte)
        self._pipeline = chosen_pipeline(self.model, self._budget, pipe, backend, ())

    def _prompt(self, ids: Tensor) -> Prompt:
        """The prompt of ids [T]; raises `PromptError` if there is nothing to compress."""
        ids, length, parts = ids.cpu(), len(ids), self._parts
        start, end = parts.prefix_tokens, length - parts.question_tokens
        if end <= start:
            raise PromptError(
                f"A prompt of {length} tokens has nothing to compress: its first {start} "
                f"(prefix_tokens) and its last {parts.question_tokens} (question_tokens) stay "
                f"whole. Set them lower, or leave tasks with short prompts to --model hf."
            )
        spans = PromptSpans(start, end, length if parts.question_seen else end, length)
        tail = None
        if not parts.question_seen:
            # A second pass reads this before the text again: no question, only a chat's next turn.
            chat = getattr(self.tokenizer, "chat_template", None)
            turn = torch.tensor(turn_change(self.tokenizer) if chat else [], dtype=torch.int64)
            tail = turn if turn.equal(ids[length - len(turn) :]) else turn[:0]
        return Prompt(ids, spans, tokenizer=self.tokenizer, tail=tail)

    def _precision(self) -> torch.autocast:
        """`hf`'s mixed precision, if requested."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _compress(self, rows: Sequence[Tensor]) -> BaseResult:
        prompts = [self._prompt(row) for row in rows]
        return compress(self.model, prompts, budget=self._budget, pipeline=self._pipeline)

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Ids [B, T + new] of left-padded prompts [B, T] and their answers."""
        mask = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [row[seen.bool()] for row, seen in zip(context, mask, strict=True)]
        if not options.get("do_sample"):
            # Greedy is the default, and a temperature would cause warnings.
            options = {k: x for k, x in options.items() if k not in ("do_sample", "temperature")}
        rows, length = context.shape
        options["stopping_criteria"] = stop_sequences_criteria(self.tokenizer, stop, length, rows)
        with self._precision():
            new = self._compress(prompts).generate_ids(max_length - length, **options)
        return torch.cat([context, new.to(context.device)], dim=1)

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """The log-probability (nats) of each continuation, and whether greedy decoding yields it.

        One compression for all requests with the same context, and one forward pass for each.
        """
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, (_, context, _) in enumerate(requests):
            alike[tuple(context)].append(place)
        answers = [(0.0, False)] * len(requests)
        title, silent = "Running loglikelihood requests", disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=silent, desc=title) as progress:
            for shared, places in alike.items():
                longest = max(len(requests[place][2]) for place in places)
                # Contexts that are too long are cut at the beginning, as in `hf`.
                kept = shared[-max(1, self.max_length + 1 - longest) :]
                with self._precision():
                    result = self._compress([torch.tensor(kept)])
                for place in places:
                    texts, _, continuation = requests[place]
                    answers[place] = self._score(result, continuation)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[place])
                    progress.update()
        return answers

    def _score(self, result: BaseResult, continuation: list[int]) -> tuple[float, bool]:
        following, ids = torch.tensor(continuation), result.prompts[0].ids
        with self._precision():
            logs = teacher_force(self.model, ids, following, result.new_cache()).log_probs.cpu()
        chosen = logs.gather(-1, following[:, None])
        return float(chosen.sum()), bool((logs.argmax(dim=-1) == following).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Raises `TaskError`: such tasks score a text that no context precedes."""
        raise TaskError(
            "Tasks of type loglikelihood_rolling, the perplexity of whole texts, have no context "
            "that could be compressed before it is used. Run them with --model hf."
        )
